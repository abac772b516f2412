# SPDX-License-Identifier: Apache-2.0
"""Makes the pages of the API reference and its indices from the declarations that headers.py has read."""

import os
import re

SAMPLE_INDENT = re.compile(r" +\S")  # after an empty line; a list item continues without one
HIDDEN = re.compile(r"= delete$|\boperator=\(|^using ModuleHolder|^static constexpr (const char\*|std::string_view) name")
# Names that need no comment, because LibTorch, iterators, saved states or the Trainer prescribe them.
UNDOCUMENTED = re.compile(r"\boverride$|^using .*::\w+$|^using \w+(_type|_category) |^using (pointer|reference) |\bstate\(Archive|\bvoid check\w*\(")
HOOK = re.compile(r"\b(attach|\w+_scope|(before|after|on)_\w+|at_boundary|scale_gradients)\(")
INTERNAL = {"Accumulator": ("NamedWindow", "named_window", "others_continue"),
            "TrainerBase": ("set_accumulate_in", "set_in_backward", "steps_in_backward"),
            "Archive": ("set_folder", "set_ranks")}
BASES = re.compile(r"\s*:\s*((?:public|private|protected)?\s*[\w:]+(?:<[^{]*>)?(?:,\s*)?)+$")


def page_of(header):
    """Returns the page of a header: reference/data/length_buckets.md for gradaccum/data/length_buckets.hpp."""
    return "reference/" + header.removeprefix("gradaccum/").removesuffix(".hpp") + ".md"


def title_of(header, names):
    """Returns the name that the header is called after, else all names if they are few, else the header's name."""
    stem = header.rsplit("/", 1)[-1].removesuffix(".hpp").replace("_", "")
    named = [name.name for name in names if name.name.lower() == stem and name.space]
    shown = [name.name for name in names if name.doc and name.space and name.kind in ("record", "function")]
    shown = [name for name in dict.fromkeys(shown) if not name.endswith(("Options", "Impl")) and not name.startswith("operator")]
    if not named:
        return ", ".join(shown) if 0 < len(shown) <= 3 else stem_of(header)
    return {"optim": "optim::", "lr": "lr::", "data": "data::"}.get(header.split("/")[1], "") + named[0]


def stem_of(header):
    return header.rsplit("/", 1)[-1].removesuffix(".hpp").replace("_", " ")


def markdown(doc):
    """Converts a documentation comment to Markdown: indented lines become code, `@note` a box."""
    lines, code, note, blank = [], False, False, True
    for line in doc:
        if SAMPLE_INDENT.match(line) and (blank or code):
            lines += [] if code else ["", "```cpp"]
            lines.append(line)
            code, blank = True, False
            continue
        if code and line.strip():
            lines += ["```", ""]
            code = False
        if line.startswith("@note"):
            lines += ["", '!!! note "Waits and memory"', "", "    " + line.removeprefix("@note").strip()]
            note = True
            continue
        line = re.sub(r"(`[^`]*`)|<(?=[\w/])", lambda match: match[1] or "&lt;", line)
        if not line.strip():
            note = False
        listed = re.match(r"[-*] ", line) and not (lines and re.match(r"([-*]|  ) ?", lines[-1]))
        lines += [""] if listed and lines and lines[-1] else []
        lines.append(("    " if note else "") + line)
        blank = not line.strip()
    return dedented(lines + (["```"] if code else []))


def dedented(lines):
    """Moves code to the left margin and removes blank lines at its end."""
    text, block = [], None
    for line in lines:
        if line == "```cpp":
            block = []
        elif line == "```" and block is not None:
            while block and not block[-1].strip():
                block.pop()
            indent = min(len(row) - len(row.lstrip()) for row in block if row.strip())
            text += ["```cpp", *(row[indent:] for row in block), "```"]
            block = None
        elif block is not None:
            block.append(line)
        else:
            text.append(line)
    return "\n".join(text)


def depths(text):
    """Returns how many brackets are open before each character; `<` counts if it opens a template's arguments."""
    open_brackets, found = "", []
    for place, letter in enumerate(text):
        found.append(len(open_brackets))
        if letter in "({[" or letter == "<" and re.search(r"(\w|template )$", text[:place]):
            open_brackets += letter
        elif letter in ")}]" or letter == ">" and open_brackets.endswith("<"):
            open_brackets = open_brackets[:-1]
    return found


def wrapped(text, width=96):
    """Wraps a declaration to the width of a page: first the template and its requires-clause, then the rest, cut where
    the fewest brackets are open."""
    text = re.sub(r"\( (?=\w)", "(", text)
    depth = depths(text)
    ends = [m.end() for m in re.finditer(r"> (?=[a-z\[~A-Z])|\) (?=\w)", text) if depth[m.end() - 1] == 0]
    head, rest = "", text
    if text.startswith("template <") and ends:
        head, rest = text[: ends[0]].rstrip() + "\n", text[ends[0] :]
        if rest.startswith("requires(") and ends[1:]:
            head, rest = head + text[ends[0] : ends[1]].rstrip() + "\n", text[ends[1] :]
    lines = []
    for line in (head + rest).split("\n"):
        while len(line) > width:
            depth = depths(line)
            cuts = [m.start() for m in re.finditer(r"(?<=,) | (?=&& |\|\| |= |requires)", line[:width]) if m.start() > 4]
            if not cuts:
                break
            cut = min(cuts, key=lambda place: (depth[place], -place))
            lines.append(line[:cut].rstrip())
            line = "    " + line[cut:].lstrip()
        lines.append(line)
    return "\n".join(lines)


def declaration(name):
    text = re.sub(r"\[\[gnu::used.*?\]\] ", "", name.text)
    if name.kind in ("record", "enum"):
        head = re.split(r"\s:\s(?!:)", text)
        bases = [base for base in re.split(r",\s*(?![^<]*>)", head[1]) if "detail::" not in base] if head[1:] else []
        text = head[0] + (" : " + ", ".join(bases) if bases else "")
        if name.kind == "enum":
            text += " { " + ", ".join(member.name for member in name.members) + " }"
    return wrapped(text) + ";"


def cell(text):
    return re.sub(r"\s+", " ", text).replace("|", "\\|")


def field_parts(member):
    """Returns a field's names, type and default."""
    text = re.sub(r"\bCount\b", "std::int64_t", member.text)
    match = re.match(r"(.*?)\b(\w+(?:\s*(?:=\s*[^,=]+)?,\s*\w+)*)\s*(=\s*.+|\{.*\})?$", text)
    start = re.search(r"\b%s\b\s*(=|\{|,|$|\[)" % re.escape(first_name(member)), text)
    kind = text[: start.start()].strip() if start else match[1]
    rest = text[start.start() :] if start else ""
    default = re.search(r"=\s*(.+)$|(\{.*\})$", rest)
    several = re.findall(r"(?:^|,\s*)(\w+)\s*(?:=\s*[^,]+?)?(?=,|$)", rest) if re.search(r",\s*\w+\s*(=|,|$)", rest) else []
    return several or [member.name], kind, (default[1] or default[2]) if default else ""


def first_name(member):
    found = re.search(r"(\w+)\s*(?:=|,|\{|$)", re.sub(r"<[^=]*>", lambda m: "_" * len(m[0]), member.text))
    return found[1] if found and found[1] in member.text else member.name


def fields_table(fields):
    """Makes a table of two columns, narrow enough for a phone: the field with type and default, and its comment."""
    rows = ['<div class="fields" markdown>', "", "| field | |", "|---|---|"]
    for member in fields:
        names, kind, default = field_parts(member)
        shown = "" if default in ("{}", "nullptr", "") or len(names) > 1 else f" = `{cell(default)}`"
        names = ", ".join(f"**`{name}`**" for name in names)
        rows.append(f"| {names}<br>`{cell(kind)}`{shown} | {cell(' '.join(member.doc))} |")
    return "\n".join([*rows, "", "</div>"])


def code(declarations):
    """Formats declarations without a copy button, since they are not meant to be copied."""
    return "``` { .cpp .no-copy }\n" + "\n".join(declarations) + "\n```"


def is_internal(owner, member, of_policy):
    """Returns whether a member is for other parts of the library only."""
    if member.access != "public" or HIDDEN.search(member.text) or member.name.startswith("~"):
        return True
    if member.name in INTERNAL.get(owner.name, ()):
        return True
    return not member.doc and not member.shared and bool(UNDOCUMENTED.search(member.text) or of_policy and HOOK.search(member.text))


def stale(found):
    """Returns an error for each name in INTERNAL that no header has."""
    there = {(name.name, member.name) for names in found.values() for name in names for member in name.members}
    return [f"docs/site/reference.py: INTERNAL names {owner}::{member}, which no header has"
            for owner, names in INTERNAL.items() for member in names if (owner, member) not in there]


def members(name, of_policy=False, level=3):
    """Lists public members in their order: fields as tables, functions with a heading, declaration and comment.

    A policy is a plain struct, so its internal members are public, too. They have no comment or one that says so.
    """
    shown, fields, calls, said, its_own, headed = [], [], [], [], False, set()

    def head(names):
        new = [one for one in dict.fromkeys(names) if one not in headed]
        headed.update(new)
        if new:
            words = ", ".join(f"`{'(constructor)' if one == name.name else one}`" for one in new)
            anchor = re.sub(r"\W+", "-", new[0]).strip("-")
            shown.append(f"{'#' * level} {words} {{#{name.name}.{anchor}}}")

    def flush():
        if fields:
            shown.append(fields_table(fields))
        if calls:
            head([call.name for call in calls])
            shown.append(code(wrapped(call.text + ";") for call in calls))
        if said:
            shown.append(markdown(said))
        fields.clear(), calls.clear(), said.clear()

    for member in name.members:
        if is_internal(name, member, of_policy):
            continue
        its_own = its_own or "like all below" in " ".join(member.doc)
        is_state = "not an option" in " ".join(member.doc)
        if member.kind == "field" and (is_state or of_policy and (its_own or not member.doc)):
            continue
        if member.kind in ("record", "enum"):
            flush()
            head([member.name])
            shown.append("\n\n".join(filter(None, [markdown(member.doc), members(member, level=level + 1)])))
        elif member.kind == "field" and not member.text.startswith(("template", "static constexpr auto")):
            if calls:
                flush()
            fields.append(member)
        else:
            if fields or said and not member.shared or calls and member.doc:
                flush()
            calls.append(member)
            said += member.doc
    flush()
    return "\n\n".join(shown)


def by_weight(header, names):
    """Sorts names: first those in the page's title, then their base classes, others, options, and concepts last."""
    titles = re.split(r"::|, ", title_of(header, names))
    bases = {base for name in names if name.name in titles for base in re.findall(r"\w+", declaration(name).partition(" : ")[2])}

    def weight(name):
        if name.name in titles:
            return 0
        if name.kind == "concept" or name.header != header:
            return 4
        return 1 if name.name in bases else 3 if name.name.endswith("Options") else 2

    before, weights = 0, []
    for name in names:  # overloads stay together
        before = before if name.shared else weight(name)
        weights.append(before)
    return [name for _, name in sorted(zip(weights, names), key=lambda pair: pair[0])]


def header_page(header, names):
    title = title_of(header, names)
    page = [f"# {title}", "", f"```cpp\n#include <{header}>\n```", ""]
    for name in by_weight(header, names):
        if not name.shared and (name.doc or not name.name.startswith("operator")):
            page += [f"## {name.full.removeprefix('ga::')} {{#{name.name}}}", ""]
        page += [code([declaration(name)]), ""]
        page += [markdown(name.doc), ""]
        if name.kind == "enum" and any(member.doc for member in name.members):
            page += ["| value | |", "|---|---|"]
            page += [*(f"| `{member.name}` | {cell(' '.join(member.doc))} |" for member in name.members), ""]
        elif name.kind == "record" and name.members:
            page += [members(name, is_policy(header, name)), ""]
    return "\n".join(page)


def link(page, header, name=None, text=None):
    target = os.path.relpath(page_of(header), os.path.dirname(page) or ".")
    return f"[{text or f'`{name.full}`'}]({target}{f'#{name.name}' if name else ''})"


def names_page(found, page):
    rows = ["# Every public name", "", "From `ga::`, the library's namespace `gradaccum`, in the order of the alphabet.", "",
            "| name | | header |", "|---|---|---|"]
    listed = {}
    for header, names in found.items():
        for name in names:
            if not name.name.startswith("operator") and name.doc:
                listed.setdefault(name.full, (header, name))
    for full, (header, name) in sorted(listed.items(), key=lambda item: item[0].lower().removeprefix("ga::")):
        rows.append(f"| {link(page, header, name)} | {cell(name.first_sentence)} | `{header}` |")
    return "\n".join(rows) + "\n"


def options_page(found, page):
    lines = ["# Every option", "", "All structs of options, and their fields: `{.steps = 4}`. Those of policies are the policies' own "
             "members: [every policy](policies.md).", ""]
    for header, names in found.items():
        for name in names:
            if name.name.endswith("Options"):
                lines += [f"## {name.full.removeprefix('ga::')}", "", f"{name.first_sentence.rstrip('.')}. {link(page, header, name)}", ""]
                fields = [member for member in name.members if member.kind == "field" and member.access == "public"]
                lines += [fields_table(fields), ""] if fields else []
    return "\n".join(lines)


def is_policy(header, name):
    return header.startswith("gradaccum/policies/") and name.kind == "record" and not name.name.endswith("Options")


def policy_options(name):
    """Returns the documented members of a policy that its users set."""
    options = []
    for member in name.members:
        said = " ".join(member.doc)
        if "like all below" in said:
            break
        its_own = re.search(r"not an option|by `attach`|^the trainer's|when the trainer is built", said) or "static" in member.text
        if member.kind == "field" and member.access == "public" and said and not its_own:
            options.append(member)
    return options


def policies_page(found, page):
    lines = ["# Every policy", "", "What a `ga::Trainer` takes behind its objective, in any order. [What a policy is](../trainer.md), "
             "and how to write one.", ""]
    rows, details = ["| policy | |", "|---|---|"], []
    for header, names in found.items():
        for name in names:
            if is_policy(header, name):
                rows.append(f"| {link(page, header, name)} | {cell(name.first_sentence)} |")
                fields = policy_options(name)
                details += [f"## {name.name}", "", fields_table(fields), ""] if fields else []
    return "\n".join([*lines, *rows, "", *details])


def errors_page(errors, found, page):
    """Lists error messages by the name that they begin with."""
    where = {}
    for header, names in found.items():
        for name in names:
            where.setdefault(name.name, (header, name))
    lines = ["# Every error", "", "What an exception says begins with the name of the class or the function that has found the "
             "mistake. `…` stands for what depends on the program. Those *of the compiler* are noticed when a program is built.", ""]
    for owner, messages in sorted(errors.items(), key=lambda item: item[0].lower()):
        lines += [f"## {owner}", ""]
        lines += [f"See {link(page, *where[owner])}.", ""] if owner in where else []
        for text, compiled in messages.items():
            lines.append(f"- {escaped(text)}{' *(of the compiler)*' if compiled else ''}")
        lines.append("")
    return "\n".join(lines)


def escaped(text):
    return re.sub(r"([\\`*_{}\[\]#])", r"\\\1", text.strip()).replace("<", "&lt;")


def modules(architecture, layering):
    """Returns modules with their purpose and public headers, in the order of layering.cmake."""
    purposes = dict(re.findall(r"^\| `(\w+)` \| (.+?) \|", architecture, re.MULTILINE))
    found = {}
    for module, public in re.findall(r"^module\((\w+)(?:\s+PUBLIC\s+((?:(?!USES)[\w/.]+\s*)+))?", layering, re.MULTILINE):
        found[module] = (purposes.get(module, ""), public.split())
    return found


def module_of(header, modules):
    name = header.removeprefix("gradaccum/").removesuffix(".hpp")
    for module, (_, public) in modules.items():
        if any(name == entry or (entry.endswith("/") and name.startswith(entry)) for entry in public):
            return module
    raise SystemExit(f"{header} is in no module of tests/support/layering.cmake")


def index_page(found, modules, page):
    lines = ["# Reference", "", "Every public header, by the [module of the house](../architecture.md) that it belongs to; made from the headers' own "
             "comments. `namespace ga = gradaccum;` everywhere. Also [by name](../index/names.md), and all [policies](../index/policies.md), "
             "[options](../index/options.md) and [errors](../index/errors.md).", ""]
    for module in reversed(modules):
        headers = [header for header in found if module_of(header, modules) == module] if modules[module][1] else []
        if not modules[module][0]:
            continue
        lines += [f"## {module} {{#{module}}}", "", modules[module][0][0].upper() + modules[module][0][1:].rstrip("?.") + ("?" if modules[module][0].endswith("?") else "."), ""]
        lines += ["| | |", "|---|---|"] if headers else ["No header of its own: other modules are made of it.", ""]
        for header in headers:
            first = next((name for name in found[header] if name.name == re.split(r"::|, ", title_of(header, found[header]))[-1]), found[header][0])
            lines.append(f"| {link(page, header, None, f'`{title_of(header, found[header])}`')} | {cell(first.first_sentence)} |")
        lines.append("")
    return "\n".join(lines)
