// SPDX-License-Identifier: Apache-2.0
// GRADACCUM_HOOK(name, signature, form) for each hook of a policy, in the order of calls (`state` may come between them). To generate code for each
// hook, define the macro, include this list, which has no include guard, and undefine the macro.

GRADACCUM_HOOK(attach, void(TrainerBase&), "attach(ga::Trainer<…>&): take auto&")
GRADACCUM_HOOK(fit_scope, std::shared_ptr<void>(std::shared_ptr<void>), "fit_scope(), and give the guard back")
GRADACCUM_HOOK(on_epoch_begin, void(std::int64_t), "on_epoch_begin(std::int64_t epoch)")
GRADACCUM_HOOK(forward_scope, std::shared_ptr<void>(std::shared_ptr<void>), "forward_scope(), and give the guard back")
GRADACCUM_HOOK(before_backward, void(Loss&), "before_backward(ga::Loss&)")
GRADACCUM_HOOK(ready, bool(), "bool ready()")
GRADACCUM_HOOK(after_backward, void(Gradients&), "after_backward(ga::Gradients&)")
GRADACCUM_HOOK(before_close, void(), "before_close()")
GRADACCUM_HOOK(scale_gradients, void(Factor&), "scale_gradients(ga::Factor&)")
GRADACCUM_HOOK(before_step, void(Gradients&), "before_step(ga::Gradients&)")
GRADACCUM_HOOK(after_window, void(const Step&), "after_window(const ga::Step&)")
GRADACCUM_HOOK(after_step, void(const Step&), "after_step(const ga::Step&)")
GRADACCUM_HOOK(before_boundary, void(), "before_boundary()")
GRADACCUM_HOOK(on_validation, void(const Validation&), "on_validation(const ga::Validation&)")
GRADACCUM_HOOK(at_boundary, void(), "at_boundary()")
GRADACCUM_HOOK(others_continue, bool(), "bool others_continue()")
GRADACCUM_HOOK(on_epoch_end, void(std::int64_t), "on_epoch_end(std::int64_t epoch)")
GRADACCUM_HOOK(state, void(Archive&), "state(ga::Archive&)")
