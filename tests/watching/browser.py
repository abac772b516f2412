# SPDX-License-Identifier: Apache-2.0
"""Opens pages of runs in a real browser: python3 browser.py PAGES_PROGRAM DIRECTORY [--keep-pictures]

They have to load without an error, request nothing, run only their own script, draw their curves, and be readable: dark
and light, on a phone, on paper. Status 77: Chromium was not found. (CHROMIUM names one.)
"""

import base64
import hashlib
import json
import os
import pathlib
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import time
import zlib

SKIPPED = 77
failures = []


def check(holds, what):
    print(("ok      " if holds else "FAILED  ") + what)
    if not holds:
        failures.append(what)


def check_hashes(page):
    """Checks that a page allows exactly its style and its script, by hash; this needs no browser."""
    text = page.read_text()
    for kind in ("style", "script"):
        held = re.search(rf"<{kind}>(.*?)</{kind}>", text, re.S).group(1)
        expected = base64.b64encode(hashlib.sha256(held.encode()).digest()).decode()
        found = re.search(rf"{kind}-src 'sha256-([^']*)'", text).group(1)
        check(found == expected, f"page_template.hpp: the hash of its {kind} is {expected}")


class Browser:
    """A headless Chromium, controlled through a pipe by its DevTools protocol."""

    def __init__(self, program, profile):
        ours_read, theirs_write = os.pipe()
        theirs_read, ours_write = os.pipe()

        def connect():
            read, write = os.dup(theirs_read), os.dup(theirs_write)
            os.dup2(read, 3)
            os.dup2(write, 4)

        self.process = subprocess.Popen(
            [program, "--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--no-first-run",
             "--disable-extensions", "--disable-background-networking", "--disable-dev-shm-usage", "--hide-scrollbars",
             f"--user-data-dir={profile}", "about:blank"],
            preexec_fn=connect, close_fds=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(theirs_read)
        os.close(theirs_write)
        self.read, self.write = os.fdopen(ours_read, "rb"), os.fdopen(ours_write, "wb")
        self.number, self.events, self.rest, self.session = 0, [], b"", None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Log", "Network", "Runtime"):
            self.call(domain + ".enable")

    def message(self):
        while b"\0" not in self.rest:
            more = os.read(self.read.fileno(), 1 << 20)
            if not more:
                raise RuntimeError("the browser has ended")
            self.rest += more
        text, self.rest = self.rest.split(b"\0", 1)
        return json.loads(text)

    def call(self, method, **parameters):
        self.number += 1
        request = {"id": self.number, "method": method, "params": parameters}
        if self.session:
            request["sessionId"] = self.session
        self.write.write(json.dumps(request).encode() + b"\0")
        self.write.flush()
        while True:
            answer = self.message()
            if answer.get("id") == self.number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
            self.events.append(answer)

    def open(self, page, width, height, scheme="light"):
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1,
                  mobile=width < 500)
        self.call("Emulation.setEmulatedMedia", media="", features=[{"name": "prefers-color-scheme", "value": scheme}])
        for address in ("about:blank", page.resolve().as_uri()):  # so that a page that is already open is reloaded
            self.events = []
            self.call("Page.navigate", url=address)
            self.loaded()

    def loaded(self):
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self.message())
        self.evaluate("1")  # waits for the events of loading

    def evaluate(self, expression):
        return self.call("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def complaints(self):
        found = []
        for event in self.events:
            method, parameters = event.get("method"), event.get("params", {})
            if method == "Log.entryAdded":
                found.append(parameters["entry"]["text"])
            elif method in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled"):
                found.append(json.dumps(parameters)[:200])
            elif method == "Network.requestWillBeSent" and parameters["type"] != "Document":
                found.append("asked for " + parameters["request"]["url"][:100])
        return found

    def picture(self, path, width=None, height=None):
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": width or size["width"], "height": height or size["height"], "scale": 1}
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)["data"]
        path.write_bytes(base64.b64decode(data))

    def close(self):
        try:
            self.session = None
            self.call("Browser.close")
        except RuntimeError:
            pass
        self.process.wait()


def pixels(path):
    """Returns the rows of a PNG with 8 bits per channel, and the number of bytes per pixel."""
    data, at, packed = path.read_bytes(), 8, b""
    while at < len(data):
        length, kind = struct.unpack(">I4s", data[at:at + 8])
        body = data[at + 8:at + 8 + length]
        if kind == b"IHDR":
            width, height, _, colours = struct.unpack(">IIBB", body[:10])
        elif kind == b"IDAT":
            packed += body
        at += 12 + length
    step = {2: 3, 6: 4}[colours]
    raw, row, rows = zlib.decompress(packed), bytearray(width * step), []
    for line in range(height):
        kind, now = raw[line * (width * step + 1)], bytearray(raw[line * (width * step + 1) + 1:(line + 1) * (width * step + 1)])
        for i in range(len(now)):
            left, up, corner = (now[i - step] if i >= step else 0), row[i], (row[i - step] if i >= step else 0)
            if kind == 1:
                now[i] = (now[i] + left) & 255
            elif kind == 2:
                now[i] = (now[i] + up) & 255
            elif kind == 3:
                now[i] = (now[i] + (left + up) // 2) & 255
            elif kind == 4:
                guess = left + up - corner
                nearest = min((left, up, corner), key=lambda one: abs(guess - one))
                now[i] = (now[i] + nearest) & 255
        row = now
        rows.append(bytes(now))
    return rows, step


def share_of(path, colour):
    """Returns the share of a picture that is close to this color."""
    rows, step = pixels(path)
    near = total = 0
    for row in rows[::2]:
        for i in range(0, len(row), 2 * step):
            total += 1
            near += all(abs(row[i + channel] - colour[channel]) < 24 for channel in range(3))
    return near / total


def check_page(browser, page, width, scheme, pictures):
    name = f"{page.stem}, {scheme}, {width} wide"
    browser.open(page, width, 900, scheme)
    check(browser.complaints() == [], f"{name}: no error, and nothing asked for {browser.complaints()[:3]}")
    check(browser.evaluate("document.documentElement.scrollWidth <= innerWidth"), f"{name}: no wider than the window")
    check(browser.evaluate("document.scripts.length") == 2, f"{name}: no script but its own, and its JSON")
    check(browser.evaluate("document.querySelectorAll('img, b b, [onload], [onerror], [onmouseover]').length") == 0,
          f"{name}: no name became an element or an attribute")
    check(browser.evaluate("document.title.includes('it ran') && !document.title.includes('<')") is False,
          f"{name}: nothing ran")
    dark = browser.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0] < 60")
    check(dark == (scheme == "dark"), f"{name}: the colours of the scheme (the style is let in)")
    small = browser.evaluate("[...document.querySelectorAll('.tick, .unit, td, th, p, small')].filter(one => "
                             "parseFloat(getComputedStyle(one).fontSize) < 10).length")
    check(small == 0, f"{name}: no text too small to read")
    lines = browser.evaluate("[...document.querySelectorAll('path.line')].map(one => one.getAttribute('d'))")
    check(not any("NaN" in line or "Infinity" in line for line in lines), f"{name}: places are numbers")
    drawn = browser.evaluate("[...document.querySelectorAll('figure')].every(one => [...one.querySelectorAll('path.line')]"
                             ".some(line => line.getBoundingClientRect().width > 20))")
    check(drawn, f"{name}: each chart has a curve")
    outside = browser.evaluate("[...document.querySelectorAll('figure')].filter(one => [...one.querySelectorAll('.tick')]"
                               ".some(text => text.getBoundingClientRect().left < one.getBoundingClientRect().left || "
                               "text.getBoundingClientRect().right > one.getBoundingClientRect().right)).length")
    check(outside == 0, f"{name}: the axes' texts are within their figure")
    bare = browser.evaluate("[...document.querySelectorAll('figure')].filter(one => "
                            "one.querySelectorAll('.tick').length < 4).length")
    check(bare == 0, f"{name}: each axis has ticks")
    if "--keep-pictures" in sys.argv:
        browser.picture(pictures / f"{page.stem}-{scheme}-{width}.png")


def check_readings(browser, page, pictures):
    browser.open(page, 1100, 900)
    place = browser.evaluate("(() => { const box = document.querySelector('figure svg').getBoundingClientRect(); "
                             "return [box.left + box.width / 2, box.top + box.height / 2]; })()")
    visible = "[...document.querySelectorAll('output')].filter(one => one.offsetWidth > 0).map(one => one.textContent)"
    check(browser.evaluate(visible) == [], "no numbers without a pointer")
    browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=place[0], y=place[1])
    shown = browser.evaluate(visible)
    check(len(shown) == 1 and re.match(r"update [0-9,]+train 0\.\d+ \(0\.\d+ – 0\.\d+\)validation 0\.\d+", shown[0]),
          f"numbers under the pointer: {shown}")
    if "--keep-pictures" in sys.argv:
        browser.picture(pictures / "readings.png", 1100, 900)


def check_scale(browser, page):
    browser.open(page, 1100, 900)
    state = ("[document.querySelector('path.line').getAttribute('d'), "
             "document.querySelector('button').getAttribute('aria-pressed')]")
    linear = browser.evaluate(state)
    browser.evaluate("document.querySelector('button').click()")
    logarithmic = browser.evaluate(state)
    check([linear[1], logarithmic[1]] == ["false", "true"] and linear[0] != logarithmic[0], "a scale can be logarithmic")
    browser.events = []
    browser.call("Page.reload")
    browser.loaded()
    check(browser.evaluate(state) == logarithmic, "and stays so when the page reads itself anew")


def check_names(browser, page):
    browser.open(page, 600, 400)
    pressed = "[...document.querySelectorAll('button')].map(one => one.getAttribute('aria-pressed')).join(' ')"
    names = browser.evaluate("charts.map(one => one.name)")
    check(names == ["", "tables", "log=", "a&b", "memory", "lr", "memory/"], f"a chart of each name: {names}")
    check(browser.evaluate(pressed) == " ".join(7 * ["false"]), "no scale is switched where the address names none")
    areas = browser.evaluate("charts.map(one => one.figure.querySelectorAll('path.area').length)")
    check(areas == [0, 0, 0, 0, 0, 0, 2], f"what is stacked is memory/, and not a curve called memory: {areas}")
    rows = browser.evaluate("[...document.querySelectorAll('tr')].filter(one => one.textContent.includes('MB'))"
                            ".map(one => one.firstChild.textContent)")
    check(rows == ["memory/a", "memory/b"], f"nothing else is in MB: {rows}")
    browser.evaluate("scrollTo(0, 300)")
    places = browser.evaluate("[scrollY, ...charts.flatMap(({figure}) => [0, 1].map(() => { "
                              "figure.querySelector('button').click(); return scrollY; }))]")
    check(places == 15 * [300], f"switching a scale there and back scrolls nowhere: {places}")
    browser.evaluate("for (const i of [0, 1, 2, 3, 5]) charts[i].figure.querySelector('button').click()")
    time.sleep(0.2)
    check(browser.evaluate("scrollY") == 300, "nor later")
    switched = browser.evaluate(pressed)
    browser.events = []
    browser.call("Page.reload")
    browser.loaded()
    check(switched == "true true true true false true false" == browser.evaluate(pressed),
          f"scales of any name outlive a reload: {switched}")
    time.sleep(0.2)
    check(browser.evaluate("scrollY") == 300, "which scrolls nowhere, either")


def check_axes(browser, page):
    browser.open(page, 1100, 900)
    check(browser.complaints() == [], f"{page.stem}: no error {browser.complaints()[:3]}")
    bare = browser.evaluate("charts.filter(chart => { const {ticks} = frameOf(chart).y; return ticks.length < 2 "
                            "|| ticks.some((one, i) => i && !(one > ticks[i - 1])); }).map(chart => chart.name)")
    check(bare == [], f"{page.stem}: each axis goes up {bare}")
    for share in ("-2e305 + 1e305 * part", "1e305 + 1e305 * part", "-1e301", "1e308", "1e308 * (2 * part - 1)"):
        low, high = browser.evaluate(f"rangeOf(part => {share})")
        check(low < high and max(-low, high) <= 2e300, f"the axis of {share}: {low} to {high}")
    many = browser.evaluate("updatesOf(Array.from({length: 300000}, (_, i) => ({first: i, last: i + 1}))).ticks")
    check(many == [0, 100000, 200000, 300000], f"an axis of more points than a call has arguments: {many}")


def check_equal(browser, page, pictures):
    """Checks that equal curves are all visible, and that an axis of one number begins at 0."""
    browser.open(page, 1100, 900)
    lines = "[...charts.find(one => one.name === '%s').figure.querySelectorAll('path.line')]"
    dashes = browser.evaluate((lines % "loss") + ".slice(0, 5).map(one => one.style.strokeDasharray)")
    check(dashes == ["", "", "9, 9", "9, 9", "6, 12"], f"{page.stem}: each curve on another has gaps: {dashes}")
    note = browser.evaluate("charts.find(one => one.name === 'loss').figure.querySelector('.note').textContent")
    check(note == "Dashed, since on other curves: 16 x 4 · train, 16 x 4 · validation, 4 x 16.", f"{page.stem}: and it is said: {note}")
    picture = pictures / "equal.png"
    browser.picture(picture)
    for colour in ((11, 106, 173), (208, 90, 0), (0, 134, 106)):
        check(share_of(picture, colour) > 0.0005, f"{page.stem}: the curve of colour {colour} is seen")
    x, y = browser.evaluate("(() => { const {x, y} = frameOf(charts.find(one => one.name === 'accuracy')); "
                            "return [x.ticks, y.ticks]; })()")
    check(x[0] == 0 and y[0] == 0 and 0.5 < y[-1] <= 1, f"{page.stem}: the axes of one validation: {x} and {y}")


def check_paper(browser, page, pictures):
    browser.open(page, 1100, 900)
    data = base64.b64decode(browser.call("Page.printToPDF", printBackground=True)["data"])
    (pictures / f"{page.stem}.pdf").write_bytes(data)
    check(data.startswith(b"%PDF") and len(data) > 20_000, f"{page.stem}: a PDF of {len(data)} bytes")


def check_in(browser, pages, pictures):
    for name in ("running", "over", "several", "hostile", "drawings", "empty"):
        for width in (1100, 390):
            for scheme in ("light", "dark"):
                check_page(browser, pages / f"{name}.html", width, scheme, pictures)
                if name == "over" and width == 390:
                    blue = (11, 106, 173) if scheme == "light" else (90, 174, 240)
                    picture = pictures / "seen.png"
                    browser.picture(picture, 390, 900)
                    check(share_of(picture, blue) > 0.001, f"over, {scheme}: curves are seen")
    check_readings(browser, pages / "over.html", pictures)
    check_scale(browser, pages / "over.html")
    check_names(browser, pages / "named.html")
    check_axes(browser, pages / "gaps.html")
    check_equal(browser, pages / "equal.html", pictures)
    check_paper(browser, pages / "over.html", pictures)
    browser.open(pages / "over.html", 1100, 900)
    check(browser.evaluate("[...document.querySelectorAll('h3')].map(one => one.textContent)") ==
          ["Loss", "Accuracy", "Learning rate", "Gradient norm", "Samples per second", "Memory (MB)"], "six charts")
    check(browser.evaluate("document.querySelectorAll('figure')[5].querySelectorAll('path.area').length") == 4,
          "memory is stacked")
    rows = browser.evaluate("[...document.querySelectorAll('tr')].map(one => [...one.children].map(c => c.textContent))")
    check(["seconds", "60.78"] in rows and any(row[0] == "train/loss" and len(row) == 4 for row in rows), "its tables")
    browser.open(pages / "several.html", 1100, 900)
    check(browser.evaluate("[...document.querySelectorAll('figure')[0].querySelectorAll('li')].map(one => "
                           "one.textContent)")[:3] == ["64 x 1 · train", "64 x 1 · validation", "16 x 4 · train"],
          "several runs on the same axes")
    under = browser.evaluate("charts.map(one => one.series.filter(series => series.under.length).length)")
    check(under[1:] == [0, 2, 0, 0, 0], f"of which the learning rate is the same, and nothing with noise: {under}")
    check(browser.evaluate("[...document.querySelectorAll('figure')].at(-1).querySelectorAll('path.line').length") == 3,
          "of memory the sum of each")
    check_drawings(browser, pages / "drawings.html")
    check_gaps(browser, pages / "gaps.html")
    check_reload(browser, pages / "running.html")


def check_drawings(browser, page):
    browser.open(page, 1100, 900)
    boxes = browser.evaluate("[...document.querySelectorAll('.frames svg')].map(one => one.getBoundingClientRect())"
                             ".map(box => [box.width, box.height])")
    check(len(boxes) == 10 and all(width > 100 and abs(width - 2 * height) < 1 for width, height in boxes),
          f"ten drawings, twice as wide as high: {boxes}")
    # The pendulum hangs: its end is below its hinge, and moves from left to right.
    paths = browser.evaluate("[...document.querySelectorAll('.frames svg')].map(one => one.querySelector('path'))"
                             ".map(one => one.getAttribute('d').match(/[-.0-9]+/g).map(Number))")
    ends = [end for _, _, *end, _ in paths]
    check(all(y > 0.8 for _, y in ends) and ends == sorted(ends), f"y points upwards: {ends}")


def check_gaps(browser, page):
    browser.open(page, 1100, 900)
    note = browser.evaluate("document.querySelector('figure .note').textContent")
    check(note == "▲ cut off: up to 1,000,000 at update 2. × NaN or infinite: 100.", f"what is not in the picture: {note}")
    check(browser.evaluate("document.querySelector('path.line').getAttribute('d').match(/M/g).length") == 2,
          "a curve on both sides of a gap")
    check(browser.evaluate("[...document.querySelectorAll('.mark')].map(one => one.textContent).join('')")
          .startswith("▲×"), "marks")


def check_reload(browser, page):
    """Checks that the page of a running run reloads itself, here after a second, and a finished run's does not."""
    text = page.read_text()
    for state, times in (("running", 1), ("finished", 0)):
        other = page.parent / f"reload-{state}.html"
        other.write_text(text.replace('"refresh":10.0', '"refresh":1.0').replace('"state":"running"', f'"state":"{state}"'))
        browser.open(other, 1100, 900)
        browser.events = []
        time.sleep(2)
        browser.evaluate("1")
        loads = len([event for event in browser.events if event.get("method") == "Page.loadEventFired"])
        check(min(loads, 1) == times, f"a run that is {state} was read anew {loads} times")


def main():
    program, directory = sys.argv[1], pathlib.Path(sys.argv[2])
    subprocess.run([program, str(directory)], check=True)
    check_hashes(directory / "over.html")
    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser") \
        or shutil.which("google-chrome")
    if not failures and not chromium:
        print("skipped: no Chromium is installed")
        return SKIPPED
    if chromium:
        with tempfile.TemporaryDirectory() as profile:
            browser = Browser(chromium, profile)
            try:
                check_in(browser, directory, directory)
            finally:
                browser.close()
    print(f"{len(failures)} failed")
    return 1 if failures else 0


sys.exit(main())
