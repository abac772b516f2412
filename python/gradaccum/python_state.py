# SPDX-License-Identifier: Apache-2.0
"""Finds values that modules and functions keep in Python objects, outside the tensors that compiled code reads."""

import collections
import functools
import pickle
import random
import sys
import types

import torch

PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
HOLDERS = (dict, list, collections.deque, set, types.CellType)  # containers whose content can change


class PythonState:
    """Attributes, variables of closures and states of random generators, including those inside lists, dictionaries,
    sets, arrays and objects. Excludes globals and attributes of classes."""

    def __init__(self, roots, but=()):
        """`roots`: modules and functions by name. `but`: tensors to leave out."""
        self.kept, self.values, seen = [], collections.defaultdict(list), set(map(id, but))
        todo = collections.deque(roots.items())
        while todo:
            name, value = todo.popleft()
            if isinstance(value, PLAIN):
                self.values[name].append(repr(value))
            elif id(value) not in seen:
                seen.add(id(value))
                content = content_of(value)
                self.kept.append((value, content))
                self.values[name].append(type(value).__name__ if isinstance(value, HOLDERS) else content)
                todo += [((name + suffix).lstrip("."), part) for suffix, part in parts_of(value)]

    def restore(self):
        for owner, content in self.kept:
            restore(owner, content)

    def difference(self, other):
        """The names of the values that differ."""
        return [name for name in {**self.values, **other.values} if not same(self.values[name], other.values[name])]


def parts_of(value):
    """The parts of an object, each with the end of its name."""
    if isinstance(value, dict):
        return [(f".{key}", part) for key, part in value.items()]
    if isinstance(value, (list, tuple, collections.deque, set, frozenset)):
        return [(f"[{number}]", part) for number, part in enumerate(value)]
    if isinstance(value, types.CellType):
        return [("", part) for part in held_by(value)]
    if isinstance(value, types.MethodType):
        return [("", value.__self__), ("", value.__func__)]
    if isinstance(value, functools.partial):
        return [("", value.func), ("", value.args), ("", value.keywords)]
    if isinstance(value, types.FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or ())
        return [("", vars(value)), ("", value.__defaults__), *((f".{name}", cell) for name, cell in cells)]
    attributes = getattr(value, "__dict__", None)
    is_leaf = isinstance(value, (type, types.ModuleType, torch.Tensor)) or not isinstance(attributes, dict)
    return [] if is_leaf else [("", attributes)]


def held_by(holder):
    if isinstance(holder, types.CellType):
        try:
            return [holder.cell_contents]
        except ValueError:  # it is empty
            return []
    return [*holder, *holder.values()] if isinstance(holder, dict) else list(holder)


def is_generator(value):
    return isinstance(value, (random.Random, torch.Generator)) or type(value).__name__ == "RandomState"  # NumPy's


def content_of(value):
    """A copy of the values that can change in an object itself, or the name of its type if none can."""
    if isinstance(value, HOLDERS):
        return held_by(value)
    if type(value) in (torch.Tensor, torch.nn.Parameter):
        return value.detach().clone(), value._version
    if is_generator(value):
        return pickle.dumps(value.getstate() if isinstance(value, random.Random) else value.get_state())
    is_of_numpy = hasattr(value, "tobytes") and not isinstance(value, type)
    return value.tobytes() if is_of_numpy else type(value).__name__


def restore(owner, content):
    """Gives an object its content again. Does nothing with tensors that did not change: in a trace it would be recorded."""
    if isinstance(owner, HOLDERS):
        if list(map(id, held_by(owner))) == list(map(id, content)):
            return
        if isinstance(owner, types.CellType):
            owner.cell_contents, = content or [None]
            return
        owner.clear()
        if isinstance(owner, dict):
            owner.update(zip(content, content[len(content) // 2:]))
        else:
            (owner.update if isinstance(owner, set) else owner.extend)(content)
    elif isinstance(content, tuple):
        if owner._version != content[1]:
            owner.detach().copy_(content[0])
    elif is_generator(owner):
        (owner.setstate if isinstance(owner, random.Random) else owner.set_state)(pickle.loads(content))
    elif isinstance(content, bytes) and owner.tobytes() != content and owner.shape:
        owner[...] = sys.modules["numpy"].frombuffer(content, owner.dtype).reshape(owner.shape)


def same(values, others):
    """Whether two lists of contents are equal, bit for bit but for NaN."""
    def equal(one, other):
        if not (isinstance(one, tuple) and isinstance(other, tuple)):
            return one == other if type(one) is type(other) else False
        (one, _), (other, _) = one, other
        return (one.shape == other.shape and one.dtype == other.dtype and one.device == other.device
                and torch.allclose(one, other, rtol=0, atol=0, equal_nan=True))
    return len(values) == len(others) and all(map(equal, values, others))
