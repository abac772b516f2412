#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The FashionMNIST example by two machines: python3 two_machines.py FASHION_MNIST WRITE_IDX_FILES DIRECTORY

Each machine is a network namespace of Linux with one network card (a TAP device). This program is the cable between the
two: it passes frames on after a delay and within a rate, until it is cut. That needs neither netem nor veth, which many
kernels lack, and leaves nothing behind.

Over slow links they must train as on one machine, to the bit. When a process is killed or suspended, or the link fails
silently, both must end and name the missing rank. They must find the card themselves: this host's name resolves to
neither network, as is common on Debian. Status 77: networks and cards cannot be made here (that takes root, Linux, and
/dev/net/tun).
"""

import collections
import contextlib
import ctypes
import fcntl
import os
import pathlib
import select
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time

SKIPPED = 77
GUARD = 300  # seconds; even on a busy machine everything takes less
PORT = 29500  # in networks that only this program uses
CARD = "cable"

CLONE_NEWNET = 0x40000000
TUNSETIFF = 0x400454CA
IFF_TAP, IFF_NO_PI = 0x0002, 0x1000
system = ctypes.CDLL(None, use_errno=True)


def require(result):
    if result != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


def own_network():
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY)


def keep(stack, what):
    """Closes an object at the end of the stack."""
    return stack.enter_context(contextlib.closing(what))


class Machine:
    """A network with a card. Processes started in it see no other."""

    def __init__(self, address):
        self.address = address
        outside = own_network()
        try:
            require(system.unshare(CLONE_NEWNET))
            self.network = own_network()
            self.card = self.make_card()
        finally:
            require(system.setns(outside, 0))
            os.close(outside)

    def make_card(self):
        card = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(card, TUNSETIFF, struct.pack("16sH22x", CARD.encode(), IFF_TAP | IFF_NO_PI))
        for line in (f"address add {self.address}/24 dev {CARD}", f"link set {CARD} mtu 9000 up", "link set lo up"):
            subprocess.run(["ip", *line.split()], check=True)
        return card

    @contextlib.contextmanager
    def entered(self):
        outside = own_network()
        require(system.setns(self.network, 0))
        try:
            yield
        finally:
            require(system.setns(outside, 0))
            os.close(outside)

    def close(self):
        os.close(self.card)
        os.close(self.network)


class Lane:
    """One direction of a cable: frames on their way from one card to the other."""

    LONGEST = 1000  # frames under way; further ones are lost, as in a switch

    def __init__(self, begin, end, delay, rate):
        self.begin, self.end, self.delay, self.rate = begin, end, delay, rate
        self.frames = collections.deque()
        self.free = 0.0  # when the last bit of the last frame has been sent

    def take(self, now):
        with contextlib.suppress(BlockingIOError):
            while True:
                frame = os.read(self.begin, 65536)
                if len(self.frames) < self.LONGEST:
                    self.free = max(now, self.free) + len(frame) * 8 / self.rate
                    self.frames.append((self.free + self.delay, frame))

    def give(self, now):
        while self.frames and self.frames[0][0] <= now:
            os.write(self.end, self.frames.popleft()[1])

    def next(self):
        return self.frames[0][0] if self.frames else float("inf")


class Cable:
    """A cable between two machines. `rate` is in bits per second."""

    def __init__(self, first, second, delay, rate):
        self.lanes = (Lane(first.card, second.card, delay, rate), Lane(second.card, first.card, delay, rate))
        self.lost = self.ended = False
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self):
        while not self.ended:
            pause = min(0.1, max(0.0, min(lane.next() for lane in self.lanes) - time.monotonic()))
            ready, _, _ = select.select([lane.begin for lane in self.lanes], [], [], pause)
            now = time.monotonic()
            for lane in self.lanes:
                if lane.begin in ready:
                    lane.take(now)
                if self.lost:
                    lane.frames.clear()
                lane.give(now)

    def cut(self):
        """Loses all frames without notice to either side."""
        self.lost = True

    def mend(self):
        self.lost = False

    def close(self):
        self.ended = True
        self.thread.join()


class Process:
    """A rank, whose output and errors are written to files."""

    def __init__(self, rank, program, directory, **environment):
        directory.mkdir(parents=True, exist_ok=True)
        self.rank = rank
        self.files = {name: directory / f"{name}_{rank}" for name in ("output", "errors")}
        environment = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "MASTER_PORT": PORT, "OMP_NUM_THREADS": 1,
                       **environment}
        with self.files["output"].open("w") as output, self.files["errors"].open("w") as errors:
            self.process = subprocess.Popen(program, stdout=output, stderr=errors, stdin=subprocess.DEVNULL,
                                            env=os.environ | {name: str(value) for name, value in environment.items()})

    def text(self, name):
        return self.files[name].read_text()

    def send(self, what):
        self.process.send_signal(what)

    def status(self):
        try:
            return self.process.wait(GUARD)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"rank {self.rank} hangs, with {self.text('errors')!r}") from None

    def wait_for_output(self, part):
        end = time.monotonic() + GUARD
        while part not in self.text("output"):
            assert self.process.poll() is None, f"rank {self.rank} has ended: {self.text('errors')}"
            assert time.monotonic() < end, f"rank {self.rank} has never printed {part!r}, but {self.text('output')!r}"
            time.sleep(0.02)

    def expect_success(self):
        assert self.status() == 0, f"rank {self.rank} has failed: {self.text('errors')}"

    def expect_error(self, *parts):
        status = self.status()
        assert status == 1, f"rank {self.rank}: status {status} with {self.text('errors')!r}"
        for part in ("ProcessGroup: ", *parts):
            assert part in self.text("errors"), f"rank {self.rank}: expected {part!r} in {self.text('errors')!r}"

    def close(self):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


class Pair:
    """Two machines, a cable, and a rank on each."""

    def __init__(self, stack, program, directory, delay=0.001, rate=1e9):
        self.machines = [keep(stack, Machine(f"10.77.0.{number}")) for number in (1, 2)]
        self.cable = keep(stack, Cable(*self.machines, delay, rate))
        self.ranks = []
        for rank, machine in enumerate(self.machines):
            with machine.entered():
                process = Process(rank, program, directory, MASTER_ADDR="10.77.0.1")
            self.ranks.append(keep(stack, process))

    def wait_until_they_train(self):
        self.ranks[0].wait_for_output("Epoch 2")


class Trainings:
    """The tests, with the program and a directory."""

    STORE = "rank 0 (its store at 10.77.0.1:29500) has ended"
    SILENT = " or hangs, or cannot be reached: silent for 30 s (rank "

    def __init__(self, example, writer, directory):
        self.directory = directory
        subprocess.run([writer, directory / "data"], check=True)
        self.program = [example, "--data", directory / "data", "--device", "cpu", "--depth", "1", "--batch-size", "12",
                        "--accumulate", "2", "--optimizer", "adamw", "--trainer"]

    def short(self, name):
        return [*self.program, "--epochs", "2", "--save", self.directory / name / "states", "--save-every", "7"]

    def endless(self):
        return [*self.program, "--shard", "gradients", "--epochs", "1000000"]

    def weights(self, name):
        newest = max((self.directory / name / "states").glob("step-*"))
        return newest.name, (newest / "model.safetensors").read_bytes()

    def on_one_machine(self):
        with contextlib.ExitStack() as stack:
            machine = keep(stack, Machine("10.77.0.1"))
            with machine.entered():
                ranks = [keep(stack, Process(rank, self.short("one"), self.directory / "one", MASTER_ADDR="127.0.0.1"))
                         for rank in (0, 1)]
            for rank in ranks:
                rank.expect_success()

    def over(self, name, delay, rate, interruption=0):
        with contextlib.ExitStack() as stack:
            pair = Pair(stack, self.short(name), self.directory / name, delay, rate)
            if interruption > 0:
                pair.wait_until_they_train()
                pair.cable.cut()
                time.sleep(interruption)
                pair.cable.mend()
            for rank in pair.ranks:
                rank.expect_success()
        assert self.weights(name) == self.weights("one"), f"{name}: other weights than on one machine"

    def killed(self, rank, *parts):
        with contextlib.ExitStack() as stack:
            pair = Pair(stack, self.endless(), self.directory / f"killed_{rank}")
            pair.wait_until_they_train()
            pair.ranks[rank].send(signal.SIGKILL)
            pair.ranks[1 - rank].expect_error(*parts)

    def silent(self):
        """Tests a lost link and a suspended process together, because the silence takes half a minute."""
        with contextlib.ExitStack() as stack:
            lost = Pair(stack, self.endless(), self.directory / "lost")
            suspended = Pair(stack, self.endless(), self.directory / "suspended")
            for pair in (lost, suspended):
                pair.wait_until_they_train()
            lost.cable.cut()
            suspended.ranks[1].send(signal.SIGSTOP)
            lost.ranks[0].expect_error("rank 1 has ended" + self.SILENT)
            lost.ranks[1].expect_error(self.STORE + self.SILENT)
            suspended.ranks[0].expect_error("rank 1 has ended" + self.SILENT)
            suspended.ranks[1].send(signal.SIGCONT)
            suspended.ranks[1].expect_error(self.STORE)


def reason_to_skip():
    if not sys.platform.startswith("linux") or shutil.which("ip") is None:
        return "needs Linux and its program ip"
    try:
        Machine("10.77.0.1").close()
    except (OSError, AttributeError, subprocess.CalledProcessError) as error:
        return f"no network of its own, or no card in it: {error}"
    return None


def timed(what, action, *arguments):
    begin = time.monotonic()
    action(*arguments)
    print(f"ok      {what} ({time.monotonic() - begin:.1f} s)", flush=True)


def main(example, writer, directory):
    reason = reason_to_skip()
    if reason:
        print("skipped: " + reason)
        return SKIPPED
    shutil.rmtree(directory, ignore_errors=True)
    trainings = Trainings(example, writer, directory)
    timed("one machine", trainings.on_one_machine)
    timed("1 ms", trainings.over, "near", 0.001, 1e9)
    timed("20 ms and 100 Mbit/s", trainings.over, "far", 0.020, 1e8)
    timed("a link that is lost for 3 s", trainings.over, "interrupted", 0.001, 1e9, 3)
    timed("a killed process", trainings.killed, 1, "rank 1 has ended or hangs (rank 0 of 2 waited for ")
    timed("the killed process of the store", trainings.killed, 0, trainings.STORE)
    timed("a lost link, and a suspended process", trainings.silent)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], pathlib.Path(sys.argv[3])))
