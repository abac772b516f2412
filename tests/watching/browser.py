# SPDX-License-Identifier: Apache-2.0
"""Opens pages of runs in a real browser: python3 browser.py PAGES_PROGRAM DIRECTORY [--keep-pictures]

They have to load without an error, ask for nothing, run nothing, and be readable: dark and light, on a phone, on paper.
Status 77: there is no Chromium here. (CHROMIUM names one.)
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
import zlib

SKIPPED = 77
failures = []


def check(holds, what):
    print(("ok      " if holds else "FAILED  ") + what)
    if not holds:
        failures.append(what)


def check_style(page):
    """The hash that a page lets in is that of its style: this part needs no browser."""
    text = page.read_text()
    style = re.search(r"<style>(.*?)</style>", text, re.S).group(1)
    expected = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    found = re.search(r"style-src 'sha256-([^']*)'", text).group(1)
    check(found == expected, f"page_style_hash is {expected}")


class Browser:
    """A Chromium without a window, driven over a pipe by its DevTools protocol."""

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
        self.events = []
        self.call("Page.navigate", url=page.resolve().as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self.message())
        self.evaluate("1")  # events of loading have come

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
    """The rows of a PNG of 8 bits a channel, and the bytes of a pixel."""
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
    """How much of a picture has about this colour."""
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
    check(browser.evaluate("document.scripts.length") == 0, f"{name}: no script")
    check(browser.evaluate("document.title.includes('it ran') && !document.title.includes('<')") is False,
          f"{name}: nothing ran")
    dark = browser.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0] < 60")
    check(dark == (scheme == "dark"), f"{name}: the colours of the scheme (the style is let in)")
    small = browser.evaluate("[...document.querySelectorAll('.plot text, td, dd, p')].filter(one => "
                             "parseFloat(getComputedStyle(one).fontSize) < 10).length")
    check(small <= browser.evaluate("document.querySelectorAll('.mark').length"), f"{name}: no text too small to read")
    drawn = browser.evaluate("[...document.querySelectorAll('path.line, path.area')].every(one => { const box = "
                             "one.getBoundingClientRect(); return box.width > 20 && one.getAttribute('d').length > 8; })")
    check(drawn, f"{name}: curves have a width")
    outside = browser.evaluate("[...document.querySelectorAll('figure')].filter(one => [...one.querySelectorAll("
                               "'.axes text')].some(text => text.getBoundingClientRect().left < one.getBoundingClientRect()"
                               ".left || text.getBoundingClientRect().right > one.getBoundingClientRect().right)).length")
    check(outside == 0, f"{name}: the axes' texts are within their figure")
    if "--keep-pictures" in sys.argv:
        browser.picture(pictures / f"{page.stem}-{scheme}-{width}.png")


def check_readings(browser, page):
    browser.open(page, 1100, 900)
    place = browser.evaluate("(() => { const box = document.querySelector('.plot').getBoundingClientRect(); "
                             "return [box.left + box.width / 2, box.top + box.height / 2]; })()")
    visible = ("[...document.querySelectorAll('.readings text')].filter(one => getComputedStyle(one).visibility === "
               "'visible').map(one => one.textContent)")
    check(browser.evaluate(visible) == [], "no numbers without a pointer")
    browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=place[0], y=place[1])
    shown = browser.evaluate(visible)
    check(len(shown) == 1 and "update" in shown[0] and "train" in shown[0], f"numbers under the pointer: {shown}")


def check_paper(browser, page, pictures):
    browser.open(page, 1100, 900)
    data = base64.b64decode(browser.call("Page.printToPDF", printBackground=True)["data"])
    (pictures / f"{page.stem}.pdf").write_bytes(data)
    check(data.startswith(b"%PDF") and len(data) > 20_000, f"{page.stem}: a PDF of {len(data)} bytes")


def check_in(browser, pages, pictures):
    for name in ("running", "over", "several", "hostile", "empty"):
        for width in (1100, 390):
            for scheme in ("light", "dark"):
                check_page(browser, pages / f"{name}.html", width, scheme, pictures)
                if name == "over" and width == 390:
                    blue = (11, 106, 173) if scheme == "light" else (90, 174, 240)
                    picture = pictures / "seen.png"
                    browser.picture(picture, 390, 900)
                    check(share_of(picture, blue) > 0.001, f"over, {scheme}: curves are seen")
    check_readings(browser, pages / "over.html")
    check_paper(browser, pages / "over.html", pictures)
    browser.open(pages / "running.html", 1100, 900)
    check(browser.evaluate("document.querySelectorAll('meta[http-equiv=refresh]').length") == 1, "a run reads itself anew")
    browser.open(pages / "over.html", 1100, 900)
    check(browser.evaluate("document.querySelectorAll('figure').length") == 6, "six charts")
    check(browser.evaluate("document.querySelectorAll('figure svg[role=img] > title').length") == 6, "each has a title")


def main():
    program, directory = sys.argv[1], pathlib.Path(sys.argv[2])
    subprocess.run([program, str(directory)], check=True)
    check_style(directory / "over.html")
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
