# SPDX-License-Identifier: Apache-2.0
"""Reads the public headers' declarations and documentation comments, without a compiler or LibTorch, in under a second.

A test compiles the headers, and they keep to one style, so a few rules are enough; the reader fails on input that it
does not know. Doxygen shows samples as prose and pages in its own style, and may not be installed on the CI machine.
"""

import dataclasses
import pathlib
import re

TOKEN = re.compile(
    r"""(?P<trailing>///<[^\n]*)|(?P<doc>///[^\n]*)|(?P<skip>//[^\n]*|/\*.*?\*/)
    |(?P<directive>^[ \t]*\#(?:\\\n|[^\n])*)
    |(?P<text>"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])')
    |(?P<open>[({\[])|(?P<close>[)}\]])|(?P<end>;)
    |(?P<other>(?:(?!//|/\*)[^"'(){}\[\];\n])+|\n|.)""",
    re.VERBOSE | re.DOTALL | re.MULTILINE,
)
RECORD = re.compile(r"(?:class|struct|union|enum(?: class)?)\s+(?:\[\]\s*)*([\w:]+)(<)?")
ACCESS = re.compile(r"\s*(public|protected|private)\s*:(?!:)")


@dataclasses.dataclass
class Name:
    """One declaration in a namespace or a class."""

    kind: str  # record, enum, enumerator, concept, alias, function, field, friend
    name: str
    text: str  # the declaration, without its body
    doc: list = dataclasses.field(default_factory=list)
    access: str = "public"
    members: list = dataclasses.field(default_factory=list)
    space: str = ""  # its namespace
    header: str = ""  # gradaccum/gradients.hpp
    line: int = 0

    @property
    def full(self):
        return f"{self.space}::{self.name}".replace("gradaccum", "ga", 1).removeprefix("::")

    @property
    def first_sentence(self):
        paragraph = " ".join(line.strip() for line in self.doc).split("  ")[0]
        sentence = re.split(r"(?<=[.:])\s", re.sub(r"^Policy: ", "", paragraph))[0].rstrip(":.")
        begins = sentence[:1].upper() if re.match(r"[a-z]+\s", sentence) else sentence[:1]
        return begins + sentence[1:] + "." if sentence else ""


def without_angles(text):
    """Removes the arguments of templates and keeps their brackets: `std::vector<>`."""
    text = re.sub(r"operator\s*(<<|<=>|<=|>=|->|<|>)", lambda m: "operator" + "@" * len(m[1]), text).replace("->", "@@")
    before = None
    while before != text:
        before, text = text, re.sub(r"<[^<>]*>", "‹›", text)
    return text.replace("‹›", "<>")


def without_template(top):
    """Removes `template <…>` and its requires-clause."""
    top = without_angles(top).strip()
    top = re.sub(r"^(template\s*<>\s*)+", "", top)
    return re.sub(r"^requires\s*(\(\)\s*)+({}\s*)?|^requires requires\s*\(\)\s*{}\s*", "", top)


class Reader:
    def __init__(self, header, text):
        self.header, self.source = header, re.sub(r"^GRADACCUM_HOOK\(.*\)$", "", text, flags=re.MULTILINE)
        self.tokens = [(m.lastgroup, m[0], m.start()) for m in TOKEN.finditer(self.source)]
        self.at = 0

    def line(self, place):
        return self.source.count("\n", 0, place) + 1

    def group(self):
        """Returns the text up to the bracket that closes the last opened one."""
        depth, text = 1, ""
        while depth:
            kind, value, _ = self.tokens[self.at]
            self.at += 1
            depth += (kind == "open") - (kind == "close")
            if kind not in ("doc", "trailing", "skip", "directive"):
                text += value
        return text

    def scope(self, space, owner=None, access="public"):
        found, doc, trailing, text, top, members, place = [], [], [], "", "", [], 0

        def finish():
            nonlocal doc, trailing, text, top, members
            if text.strip():
                new = self.declaration(text, top, space, owner)
                if new:
                    new.doc, new.access, new.members, new.line = doc + trailing, access, members, self.line(place)
                    found.append(new)
            doc, trailing, text, top, members = [], [], "", "", []

        while self.at < len(self.tokens):
            kind, value, start = self.tokens[self.at]
            self.at += 1
            if kind == "doc":
                doc.append(value[3:].removeprefix(" "))
            elif kind == "trailing":
                words = value[4:].strip()
                (trailing if text.strip() or not found else found[-1].doc).append(words)
            elif kind in ("skip", "directive"):
                continue
            elif kind == "end":
                finish()
            elif kind == "close":
                return found
            elif kind == "open" and value != "{":
                inner = self.group()
                text += value + inner
                top += "()" if value == "(" else "[]"
            elif kind == "open":
                if re.search(r"\bnamespace\b|extern\s*$|extern \"C\"\s*$", top):
                    name = (re.findall(r"namespace\s+([\w:]+)", top) or [""])[0]
                    found += self.scope(f"{space}::{name}".strip(":") if name else space)
                    doc, trailing, text, top = [], [], "", ""
                    continue
                plain = without_template(top)
                record = RECORD.match(plain) and "()" not in plain.split(":")[0]
                if record and plain.startswith("enum"):
                    members = self.enumerators(space)
                elif record:
                    members = self.scope(space, record_name(plain), "private" if plain.startswith("class") else "public")
                elif self.is_initialiser(plain):
                    text += "{" + self.group()
                    top += "{}"
                else:  # a function's body
                    self.group()
                    finish()
            else:
                if not text.strip():
                    place = start + len(value) - len(value.lstrip())
                text += value
                top += value
                label = ACCESS.match(text)
                if label and owner:
                    access = label[1]
                    text, top = text[label.end() :], top[ACCESS.match(top).end() :]
                elif text.strip().startswith("TORCH_ARG") is False and value == "\n" and not text.strip():
                    text = top = ""
        finish()
        return found

    @staticmethod
    def is_initialiser(plain):
        """Returns whether a brace opens an initializer or a requires-expression, not a function's body."""
        if re.search(r"\brequires\s*(\(\))?\s*$", plain):
            return True
        if re.search(r"(?<![=!<>@])=(?!=)", re.sub(r"operator\s*\S+\s*\(\)", "", plain)):
            return True
        if "()" not in plain:
            return True
        return bool(re.search(r"\)\s*(noexcept\s*)?:(?!:)", plain) and re.search(r"[\w>]\s*$", plain))

    def enumerators(self, space):
        found = []
        while self.at < len(self.tokens):
            kind, value, start = self.tokens[self.at]
            self.at += 1
            if kind == "close":
                return found
            if kind == "trailing":
                found[-1].doc.append(value[4:].strip())
            elif kind == "other":
                for name in re.findall(r"\b[A-Za-z]\w*", value):
                    found.append(Name("enumerator", name, name, space=space, header=self.header, line=self.line(start)))
        raise SystemExit(f"{self.header}: an enum without end")

    def declaration(self, text, top, space, owner):
        text = re.sub(r"\s+", " ", re.sub(r"\b(GRADACCUM_INLINE|inline)\s+", "", text)).strip()
        plain = re.sub(r"\[\]\s*|\b(GRADACCUM_INLINE|inline)\s+", "", without_template(top))
        plain = re.sub(r"\s+", " ", plain).strip()

        def made(kind, name, text=text):
            return Name(kind, name, text, space=space, header=self.header)

        argument = re.match(r"TORCH_ARG\((.+?),\s*(\w+)\)(.*)", text)
        if argument:
            return made("field", argument[2], f"{argument[1]} {argument[2]}{argument[3]}")
        if re.match(r"friend\b|static_assert\b|using namespace|(extern )?template (class|struct)", plain):
            return None
        if re.search(r"\bconcept\s", plain):
            return made("concept", re.search(r"concept\s+(\w+)", plain)[1])
        alias = re.match(r"using\s+(\w+)\s*=", plain) or re.match(r"using\s+[\w:<>]*?(\w+)$", plain)
        if alias:
            return made("alias", alias[1])
        record = RECORD.match(plain)
        if record and "()" not in plain.split(":")[0]:
            if not self.is_definition:
                return None
            return made("enum" if plain.startswith("enum") else "record", record[1])
        call = re.search(r"(operator\s*(?:\(\)|[^\s\w(]+|[\w:&*<> ]+?)|~?\w+)\s*\(\)", plain.replace("decltype()", "auto"))
        value = re.search(r"(?<![=!<>@])=(?!=)", re.sub(r"operator\s*=+", "", plain))
        if call and not (value and value.start() < call.start()):
            if not owner and re.match(r"(explicit\s+)?\w+\s*\(\)\s*@@", plain):
                return None  # a deduction guide
            name = re.sub(r"\s+", " ", call[1]).strip()
            if "@" in name:
                name = re.search(r"operator\s*[<>=-]+", text)[0]
            return made("function", name, without_list(text))
        name = re.findall(r"(\w+)\s*(?:\[\]\s*)?(?:[={].*)?$", re.split(r"\s*,\s*(?=\w+\s*(?:[=,]|$))", plain)[0])
        if not name:
            raise SystemExit(f"{self.header}: what is declared by '{text}'?")
        return made("field", name[-1])

    @property
    def is_definition(self):
        """Whether the record that was just read had a body."""
        back = self.at - 2
        while back >= 0 and self.tokens[back][0] in ("other", "skip", "doc", "trailing", "directive"):
            if self.tokens[back][1].strip() and self.tokens[back][0] == "other":
                return False
            back -= 1
        return self.tokens[back][1] == "}"


def record_name(plain):
    return RECORD.match(plain)[1]


def without_list(text):
    """Removes a constructor's member initializers: `: a_(a), b_(b)`."""
    depth = 0
    for place, letter in enumerate(text):
        depth += (letter in "({[") - (letter in ")}]")
        if letter == ":" and depth == 0 and text[place - 1 : place] != ":" and text[place + 1 : place + 2] != ":":
            if re.search(r"\)\s*(noexcept\s*)?$", text[:place]):
                return text[:place].strip()
    return text


def inherit(names):
    """Marks overloads that share the comment of a documented one before them."""
    for before, name in zip([None, *names], names):
        name.shared = bool(before and not name.doc and name.kind == before.kind == "function" and
                           name.name == before.name and (before.doc or before.shared))
        inherit(name.members)
    return names


def read(include):
    """Returns the public names by header; the header of a name in detail/ is the first public one that includes it."""
    found = {}
    for path in sorted(include.glob("gradaccum/**/*.hpp"), key=lambda path: "detail" in path.parts):
        header = path.relative_to(include).as_posix()
        try:
            names = Reader(header, path.read_text()).scope("")
        except SystemExit:
            if "/detail/" not in header:
                raise
            continue
        names = [name for name in names if name.space.split("::")[0] in ("gradaccum", "") and (name.space or name.doc)]
        names = [name for name in names if "detail" not in name.space.split("::")]
        if names and "/detail/" in header:
            users = [user for user in found if f"#include <{header}>" in (include / user).read_text()]
            if not users:
                raise SystemExit(f"{header} has the public name {names[0].full}, and no public header includes it")
            found[users[0]] = names + found[users[0]]
        elif names:
            found[header] = names
    return {header: inherit(names) for header, names in sorted(found.items())}


def documents(doc, name):
    return re.search(rf"`\.?{re.escape(name)}\b", "\n".join(doc))


def undocumented(found):
    """Yields a sentence for each undocumented name of a namespace, field of options, and enumerator."""
    for names in found.values():
        for name in names:
            where = f"include/{name.header}:{name.line}: {name.full}"
            if not name.doc and not name.shared and name.name not in ("operator<<", "operator=="):
                yield f"{where} has no documentation comment"
            for member in name.members:
                is_option = name.name.endswith("Options") and member.kind == "field" and member.access == "public"
                if (is_option or member.kind == "enumerator") and not member.doc and not documents(name.doc, member.name):
                    yield f"include/{name.header}:{member.line}: {name.full}::{member.name} has no documentation comment"


def errors(include):
    """Returns error messages by the class that they begin with; `…` stands for text inserted at run time."""
    found = {}
    for path in sorted([*include.glob("gradaccum/**/*.hpp"), *include.glob("gradaccum/**/*.ipp")]):
        text = path.read_text()
        for call in re.finditer(r"\b(TORCH_CHECK\w*|static_assert|runtime_error|invalid_argument|fail)\(", text):
            message = message_of(arguments(text, call.end()), call[1])
            owner = re.match(r"([A-Za-z_]\w*): (.+)", message, re.DOTALL)
            if owner:
                found.setdefault(owner[1], {}).setdefault(owner[2], call[1] == "static_assert")
    return found


def arguments(text, at):
    """Splits the text up to the closing bracket at its commas."""
    depth, parts, start = 1, [], at
    for token in TOKEN.finditer(text, at):
        depth += (token.lastgroup == "open") - (token.lastgroup == "close")
        pieces = [m.start() for m in re.finditer(",", token[0])] if token.lastgroup == "other" and depth == 1 else []
        for comma in pieces:
            parts.append(text[start : token.start() + comma])
            start = token.start() + comma + 1
        if depth == 0:
            return [*parts, text[start : token.start()]]
    return parts


def message_of(parts, call):
    message = ""
    for part in parts[call.startswith(("TORCH", "static")) :]:
        words = re.findall(r'"((?:\\.|[^"\\])*)"', part)
        literal = re.fullmatch(r'\s*(?:"(?:\\.|[^"\\])*"\s*)+', part)
        message += "".join(words) if literal or (words and part.strip().startswith(('"', "fmt::format", "std::string"))) else "…"
    message = re.sub(r"\{[^{}]*\}", "…", message.replace('\\"', '"')) if "fmt::format" in "".join(parts) else message
    return re.sub(r"…+", "…", message.replace("\\n", " "))
