#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Opens every page of the site in a headless Chromium, as a reader would: docs/site/browse.py FOLDER.

Fails if a page has an error, requests anything from another host or is wider than a phone, if search does not find its
examples, from a server or from the disk, or if a figure is not drawn. Controls Chromium through a pipe, with Python's
standard library only. Without Chromium it prints that it checked nothing, and succeeds.
"""

import argparse
import base64
import contextlib
import fcntl
import functools
import http.server
import json
import os
import pathlib
import re
import select
import shutil
import subprocess
import sys
import tempfile
import threading
import time

PHONE, DESK = (390, 844), (1280, 900)
SHOWN = ["index", "guides", "first_program", "gradient_accumulation", "from_python", "architecture", "figures", "reference/index",
         "reference/grad_accumulator", "index/errors", "index/options", "memory"]


class Chromium:
    """Controls one tab of a browser by the DevTools protocol."""

    def __init__(self, program, profile):
        command_in, self.commands = os.pipe()
        self.answers, answer_out = os.pipe()
        ours = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (command_in, answer_out)]  # not 3 or 4
        self.process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{ours[0]} 4>&{ours[1]}', "bash", program, "--headless=new", "--no-sandbox",
             "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe", f"--user-data-dir={profile}",
             "--disable-background-networking", "--disable-component-update", "--no-first-run", "--hide-scrollbars"],
            pass_fds=ours, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for end in (command_in, answer_out, *ours):
            os.close(end)
        self.read, self.number, self.events, self.session = b"", 0, [], None
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.ask(f"{domain}.enable")

    def message(self, seconds):
        end = time.monotonic() + seconds
        while b"\0" not in self.read:
            if not select.select([self.answers], [], [], max(0, end - time.monotonic()))[0]:
                raise TimeoutError("Chromium does not answer")
            piece = os.read(self.answers, 1 << 16)
            if not piece:
                raise ConnectionError("Chromium has ended")
            self.read += piece
        line, _, self.read = self.read.partition(b"\0")
        return json.loads(line)

    def ask(self, method, seconds=60, **parameters):
        self.number += 1
        request = {"id": self.number, "method": method, "params": parameters}
        if self.session:
            request["sessionId"] = self.session
        os.write(self.commands, json.dumps(request).encode() + b"\0")
        while True:
            answer = self.message(seconds)
            if answer.get("id") == self.number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
            self.events.append(answer)

    def open(self, url):
        self.events.clear()
        self.ask("Page.navigate", url=url)
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self.message(60))
        self.value("new Promise(done => requestAnimationFrame(() => setTimeout(done, 30)))")

    def value(self, expression):
        answer = self.ask("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def size(self, width, height):
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600)

    def errors(self, base):
        """Yields the page's errors since `open`, and its requests to hosts other than `base`."""
        for event in self.events:
            said = event.get("params", {})
            if event.get("method") == "Runtime.exceptionThrown":
                yield said["exceptionDetails"].get("exception", {}).get("description", "an exception")
            elif event.get("method") == "Log.entryAdded" and said["entry"]["level"] == "error":
                yield f"{said['entry']['text']} {said['entry'].get('url', '')}"
            elif event.get("method") == "Runtime.consoleAPICalled" and said["type"] == "error":
                yield f"console.error: {said['args'][:1]}"
            elif event.get("method") == "Network.requestWillBeSent":
                url = said["request"]["url"]
                if not url.startswith((base, "data:", "blob:", "about:")):
                    yield f"asks for {url}"

    def picture(self, path):
        path.write_bytes(base64.b64decode(self.ask("Page.captureScreenshot")["data"]))

    def close(self):
        with contextlib.suppress(Exception):
            self.session = None
            self.ask("Browser.close", seconds=5)
        self.process.kill()
        self.process.wait()


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@contextlib.contextmanager
def served(folder):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=folder))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()


def search(chromium, words):
    """Types `words` into the site's search and returns the results."""
    return chromium.value(f"""new Promise(done => {{
      document.querySelector('[data-md-toggle=search]').click();
      const field = document.querySelector('.md-search__input');
      field.focus();
      field.value = {json.dumps(words)};
      let left = 100;
      const look = () => {{
        field.dispatchEvent(new Event('keyup', {{bubbles: true}}));
        field.dispatchEvent(new Event('input', {{bubbles: true}}));
        const found = [...document.querySelectorAll('.md-search-result__item a')].map(a => a.getAttribute('href') + ' ' + a.innerText);
        if (found.length || --left == 0) done(found); else setTimeout(look, 100);
      }};
      look();
    }})""")


def check(chromium, folder, base, problems):
    pages = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.html"))
    chromium.size(*PHONE)
    for page in pages:
        chromium.open(base + page)
        problems += [f"{page}: {error}" for error in chromium.errors(base)]
        wide = chromium.value("document.documentElement.scrollWidth") - PHONE[0]
        if wide > 1:
            problems.append(f"{page}: {wide} pixels wider than a phone")
    for start in (base, folder.as_uri() + "/"):
        chromium.size(*DESK)
        for page in ("index.html", "reference/grad_accumulator.html"):
            chromium.open(start + page)
            found = search(chromium, "GradAccumulator")
            if not any("reference/grad_accumulator.html" in entry or entry.startswith("grad_accumulator.html") for entry in found):
                problems.append(f"{start}{page}: a search for GradAccumulator finds {found[:3] or 'nothing'}")
            problems += [f"{start}{page}: {error}" for error in chromium.errors(start)]
    chromium.open(base + "index.html")
    if search(chromium, "xylophonically"):
        problems.append("a search for a word that is nowhere finds something")
    for words, guide in (("GradAccumulator", "gradient_accumulation"), ("checkpoint", "memory"), ("keep_best", "watching")):
        chromium.open(base + "index.html")
        places = [re.sub(r".*?:\d+/|[?#].*", "", entry.split(" ")[0]) for entry in search(chromium, words)]
        lists = [i for i, place in enumerate(places) if place == "options.html" or place.startswith("index/")]
        if f"{guide}.html" not in places[: min(lists, default=len(places))]:
            problems.append(f"a search for {words} shows a list before the guide {guide}: {list(dict.fromkeys(places))}")
    lefts = {}
    for page in ("index", "figures", "memory", "reference/grad_accumulator"):
        chromium.open(f"{base}{page}.html")
        lefts[page] = chromium.value("document.querySelector('h1').getBoundingClientRect().left")
    if len(set(lefts.values())) != 1:
        problems.append(f"texts do not begin at the same place: {lefts}")
    wanted = ("[...document.querySelectorAll('.md-nav--secondary a')].some(a => a.hash === '#Accumulator.step') && "
              "document.querySelectorAll('.highlight .md-clipboard, .highlight .md-code__button').length > 0 && "
              "!document.querySelector('.no-copy .md-clipboard, .no-copy .md-code__button')")
    if not chromium.value(wanted):
        problems.append("reference/grad_accumulator.html: members are in the contents, and code has a button, but not declarations")
    chromium.size(*PHONE)
    chromium.open(base + "from_python.html")
    wide = chromium.value("[...document.querySelectorAll('.md-typeset__scrollwrap')].filter(one => one.scrollWidth > one.clientWidth + 1 "
                          "&& one.querySelectorAll('th').length < 3).length")
    if wide:
        problems.append(f"from_python.html: {wide} tables of two columns are wider than a phone")
    chromium.open(base + "memory.html")
    if not chromium.value("getComputedStyle(document.querySelector('.md-typeset__scrollwrap')).backgroundImage.includes('gradient')"):
        problems.append("memory.html: nothing shows that a table goes on beyond the edge")
    chromium.size(*DESK)
    figures = (folder.parent / "docs/pages/figures.md").read_text().count("<figure")
    chromium.open(base + "figures.html")
    drawn = chromium.value("[...document.querySelectorAll('figure.bars')].filter(f => [...f.querySelectorAll('.fill')].some("
                           "b => b.getBoundingClientRect().width > 20)).length")
    if not figures or drawn != figures:
        problems.append(f"figures.html: {drawn} of {figures} figures are drawn")
    chromium.open(base + "architecture.html")
    modules = chromium.value("[...document.querySelectorAll('.house a')].map(a => a.getAttribute('href'))")
    chromium.open(base + "reference/index.html")
    problems += [f"architecture.html: no module is at {module}" for module in modules
                 if not chromium.value(f"!!document.getElementById({json.dumps(module.split('#')[1])})")]
    if len(modules) < 10:
        problems.append(f"architecture.html: {len(modules)} modules can be clicked")
    return f"{len(pages)} pages, {figures} figures, {len(modules)} modules"


def pictures(chromium, base, folder):
    folder.mkdir(parents=True, exist_ok=True)
    for width, height, name in ((*PHONE, "phone"), (*DESK, "desk")):
        chromium.size(width, height)
        for scheme in ("light", "dark"):
            chromium.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
            for page in SHOWN:
                chromium.open(f"{base}{page}.html")
                chromium.picture(folder / f"{name}-{scheme}-{re.sub('/', '-', page)}.png")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path, help="the site, with its index.html")
    parser.add_argument("--pictures", type=pathlib.Path, help="look at some pages with your own eyes: into this folder")
    arguments = parser.parse_args()
    program = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if not program:
        print("There is no Chromium (CHROMIUM names one): the pages were built, and not looked at")
        return
    folder, problems = arguments.folder.resolve(), []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile, served(folder) as base:
        chromium = Chromium(program, profile)
        try:
            if arguments.pictures:
                pictures(chromium, base, arguments.pictures)
            else:
                seen = check(chromium, folder, base, problems)
                print(f"Chromium has looked at {seen}")
        finally:
            chromium.close()
    for problem in problems:
        print(problem, file=sys.stderr)
    if problems:
        raise SystemExit(f"docs/site/browse.py: {len(problems)} problems")


if __name__ == "__main__":
    main()
