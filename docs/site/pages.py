#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes the site's pages from docs/*.md, the headers and the benchmarks' results: docs/site/pages.py FOLDER.

Links in docs/, which lead to files of the repository, are changed to pages of the site, names of the library become
links to the reference, and generated pages are added. Needs Python's standard library only. Fails with a sentence for
each dead link, guide without an entry in docs/README.md, and public name without documentation.
"""

import json
import os
import pathlib
import re
import shutil
import sys

import figures
import headers
import reference

ROOT = pathlib.Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\(([^()\s]+(?:\([^()\s]*\))?)\)")
FENCE = re.compile(r"^( *)(```|~~~).*?^\1\2`*\s*$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"(`+)[^`].*?\1", re.DOTALL)


def sources():
    """Returns each page's source, and its path in the site."""
    found = {"README.md": "index.md", "docs/README.md": "guides.md", "CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md",
             "SECURITY.md": "security.md"}
    found |= {f"docs/{path.name}": path.name for path in DOCS.glob("*.md") if path.name != "README.md"}
    found |= {f"examples/{path.parent.name}/README.md": f"examples/{path.parent.name}.md" for path in ROOT.glob("examples/*/README.md")}
    return found


def outside_code(text, change, pattern=FENCE):
    """Applies `change` to the text outside fenced blocks (or outside spans of code)."""
    parts, end = [], 0
    for block in pattern.finditer(text):
        parts += [change(text[end : block.start()]), block[0]]
        end = block.end()
    return "".join([*parts, change(text[end:])])


class Problems(list):
    def end(self):
        for problem in self:
            print(problem, file=sys.stderr)
        if self:
            raise SystemExit(f"docs/site/pages.py: {len(self)} problems")


def turn_links(text, source, page, pages, problems):
    """Changes a repository's relative links to the site's; a link to a file that is no page becomes its text."""

    def turn(match):
        bang, words, target = match.groups()
        if re.match(r"[a-z]+:|#", target) or "\n\n" in words:
            return match[0]
        path, _, anchor = target.partition("#")
        file = os.path.normpath(os.path.join(os.path.dirname(source), path))
        if file in pages:
            there = os.path.relpath(pages[file], os.path.dirname(page) or ".")
            return f"{bang}[{words}]({there}{'#' + anchor if anchor else ''})"
        if file.startswith("docs/images/"):
            return f"{bang}[{words}]({os.path.relpath(file.removeprefix('docs/'), os.path.dirname(page) or '.')})"
        if not (ROOT / file).exists():
            problems.append(f"{source}: the link {target} leads nowhere")
        return words

    return outside_code(text, lambda part: LINK.sub(turn, part))


class Names:
    """Links spans of code to the reference: the first of each name in a section."""

    def __init__(self, found):
        self.where = {}
        for header, names in found.items():
            for name in names:
                if name.doc and not name.name.startswith("operator"):
                    self.where.setdefault(name.full.removeprefix("ga::"), (header, name))

    def target(self, code):
        qualified = re.match(r"ga::([\w:]+)", code)
        plain = re.fullmatch(r"(\w+(?:::\w+)*)(?:\(\))?", code)
        for match in (qualified, plain):
            name = match[1] if match else ""
            while name and name not in self.where:
                name = name.rpartition("::")[0]
            if name and (match is qualified or re.search(r"[A-Z]|_.*_|^\w+_\w+$", name)):
                return self.where[name]
        return None

    def link(self, text, page):
        def section(part):
            seen = set()

            def turn(match):
                if match[1]:
                    return match[0]  # a link has it already
                target = self.target(match[3])
                if not target or target[1].full in seen or reference.page_of(target[0]) == page:
                    return match[0]
                seen.add(target[1].full)
                return reference.link(page, *target, text=match[2])

            def lines(piece):
                rows = piece.split("\n")
                spans = re.compile(r"(\[(?:[^\[\]`]|`[^`]*`)*\]\([^)]*\))|(`([^`\n]+)`)")
                return "\n".join(row if row.startswith("#") else spans.sub(turn, row) for row in rows)

            return outside_code(part, lines)

        return "".join(section(part) for part in re.split(r"(?m)^(?=#+ )", text))


def clickable(svg, page):
    """Embeds the diagram of the modules in the page and links each module to the reference."""
    svg = re.sub(r"^([.\w][^{\n]*){", r".house \1{", svg, flags=re.MULTILINE)
    module = re.compile(r'(<rect class="(?:module|on)"[^>]*/>\n<text class="name"[^>]*>(\w+)</text>\n(?:<text class="what".*</text>\n)*)')
    target = os.path.relpath("reference/index.html", os.path.dirname(page) or ".")
    return '<div class="house">\n' + module.sub(rf'<a href="{target}#\2">\1</a>\n', svg).strip() + "\n</div>"


def navigation(listed, found, modules, pages):
    """Returns the site's navigation: guides as docs/README.md lists them, the reference by modules."""
    nav = [{"Home": "index.md"}]
    for title, entries in listed.items():
        nav.append({title: [{words: pages[f"docs/{path}"]} for words, path in entries]})
    nav[1][next(iter(nav[1]))].insert(0, {"All guides": "guides.md"})
    by_module = [{"By header": "reference/index.md"}, {"By name": "index/names.md"}, {"Policies": "index/policies.md"},
               {"Options": "index/options.md"}, {"Errors": "index/errors.md"}]
    for module in reversed(modules):
        headers_of = [header for header in found if reference.module_of(header, modules) == module]
        if headers_of:
            by_module.append({module: [{reference.title_of(header, found[header]): reference.page_of(header)} for header in headers_of]})
    examples = [{path.split("/")[1].removesuffix(".md").replace("_", " "): path} for path in sorted(pages.values()) if path.startswith("examples/")]
    return [*nav, {"Reference": by_module}, {"Figures": "figures.md"}, {"More": [*examples, {"Changelog": "changelog.md"}, {"Contributing": "contributing.md"}, {"Security": "security.md"}]}]


def guides(problems):
    """Returns the guides by section of docs/README.md; each guide must be listed once."""
    listed, title = {}, None
    for line in (DOCS / "README.md").read_text().splitlines():
        heading, entry = re.match(r"## (.+)", line), re.match(r"\d+\. \[([^\]]+)\]\((\w+\.md)\)", line)
        title = heading[1] if heading else title
        if entry and title:
            listed.setdefault(title, []).append((entry[1], entry[2]))
    there = {path.name for path in DOCS.glob("*.md")} - {"README.md"}
    names = [path for entries in listed.values() for _, path in entries]
    problems += [f"docs/README.md does not list docs/{name}" for name in sorted(there - set(names))]
    problems += [f"docs/README.md lists docs/{name} {names.count(name)} times" for name in sorted(set(names)) if names.count(name) > 1]
    return listed


def settings_of(page, listed):
    """Returns a page's settings: search ranks guides first and complete lists last; pages with wide content hide their
    table of contents, to use its room."""
    guides = {name for entries in listed.values() for _, name in entries} - {"options.md"}
    boost = 2 if page in guides else 0.5 if page in ("options.md", "changelog.md") or page.startswith("index/") else 1
    return f"search: {{boost: {boost}}}\n" + ("hide: [toc]\n" if page in ("index.md", "figures.md", "architecture.md") else "")


def main(folder):
    problems, pages = Problems(), sources()
    found = headers.read(ROOT / "include")
    problems += headers.undocumented(found)
    problems += reference.stale(found)
    listed = guides(problems)
    names = Names(found)
    modules = reference.modules((DOCS / "architecture.md").read_text(), (ROOT / "tests/support/layering.cmake").read_text())
    made = {}
    for source, page in pages.items():
        text = turn_links((ROOT / source).read_text(), source, page, pages, problems)
        picture = re.search(r"!\[[^\]]*\]\((?:\.\./)*images/modules\.svg\)", text)
        text = names.link(text, page) if page not in ("changelog.md",) else text
        made[page] = text.replace(picture[0], clickable((DOCS / "images/modules.svg").read_text(), page)) if picture else text
    for header, of_header in found.items():
        page = reference.page_of(header)
        made[page] = names.link(reference.header_page(header, of_header), page)
    made["reference/index.md"] = reference.index_page(found, modules, "reference/index.md")
    for index, text in {
        "index/names.md": reference.names_page(found, "index/names.md"),
        "index/options.md": reference.options_page(found, "index/options.md"),
        "index/policies.md": reference.policies_page(found, "index/policies.md"),
        "index/errors.md": reference.errors_page(headers.errors(ROOT / "include"), found, "index/errors.md"),
    }.items():
        made[index] = text
    made["figures.md"] = figures.page(DOCS)
    made = {page: f"---\n{settings_of(page, listed)}---\n\n{text}" for page, text in made.items()}
    problems.end()
    shutil.rmtree(folder, ignore_errors=True)
    for page, text in made.items():
        (folder / "pages" / page).parent.mkdir(parents=True, exist_ok=True)
        (folder / "pages" / page).write_text(text)
    shutil.copytree(DOCS / "images", folder / "pages/images")
    shutil.copytree(DOCS / "site/assets", folder / "pages/assets")
    settings = (DOCS / "site/mkdocs.yml").read_text()
    nav = json.dumps(navigation(listed, found, modules, pages))
    (folder / "mkdocs.yml").write_text(f"{settings}\ndocs_dir: pages\nsite_dir: ../site\nnav: {nav}\n")
    print(f"{len(made)} pages, {sum(map(len, found.values()))} public names")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]).resolve())
