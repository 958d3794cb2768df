"""Emulates hosts by network namespaces with slow links; needs root, ip, tc and sysctl."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

PORT = 29577


@dataclass(frozen=True)
class Host:
    """A network namespace.

    Attributes:
        name: of the namespace.
        address: of its end of the link.
        interface: that end.
    """

    name: str
    address: str
    interface: str


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(words)}: {done.stderr.strip() or done.returncode}")


def _add(host: Host) -> None:
    """Creates a namespace whose connections do not depend on what was sent over them before.

    BBR, the default of some machines, paces by its estimate of the link and stops to probe it, and
    a window that closes on an idle link opens in the time of the next call.
    """
    _run("ip", "netns", "add", host.name)
    values = ("tcp_congestion_control=reno", "tcp_slow_start_after_idle=0", "tcp_no_metrics_save=1")
    names = (f"net.ipv4.{value}" for value in values)
    _run("ip", "netns", "exec", host.name, "sysctl", "-qw", *names)


def _limit(namespace: str, interface: str, rate: str) -> None:
    """Limits the rate of an interface to `rate`, a number and a unit: "100mbit", "1gbit"."""
    units = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
    bits = float(rate[:-4]) * units[rate[-4:]]
    # Fast links have jumbo frames: the machine would be busy with smaller ones.
    packet = 9000 if interface == "lo" or bits >= 1e9 else 1500
    # A bucket saves up what an idle link could have sent. It holds two packets or a tenth of a
    # millisecond, so that the first messages of a burst are not faster than the link.
    burst = max(2 * packet + 28, round(bits / 8 * 1e-4))
    shape = ("root", "tbf", "rate", rate, "burst", str(burst), "latency", "100ms")
    _run("ip", "-n", namespace, "link", "set", interface, "mtu", str(packet))
    _run("tc", "-n", namespace, "qdisc", "add", "dev", interface, *shape)


@contextmanager
def two_hosts(rate: str) -> Iterator[tuple[Host, Host]]:
    """Two namespaces and the link between them, `rate` in each direction ("1gbit"); removed after.

    Leaves the program if they cannot be made, with the command that failed.
    """
    tag = f"ap{os.getpid()}"
    hosts = tuple(Host(f"{tag}-{n}", f"10.213.77.{n + 1}", f"{tag}v{n}") for n in range(2))
    first, second = hosts
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # past `finally`
    try:
        for host in hosts:
            _add(host)
        ends = (first.interface, "type", "veth", "peer", "name", second.interface)
        _run("ip", "link", "add", *ends)
        for host in hosts:
            _run("ip", "link", "set", host.interface, "netns", host.name)
            within = ("ip", "-n", host.name)
            _run(*within, "addr", "add", f"{host.address}/24", "dev", host.interface)
            _run(*within, "link", "set", "lo", "up")
            _run(*within, "link", "set", host.interface, "up")
            _limit(host.name, host.interface, rate)
        yield first, second
    finally:
        for host in hosts:  # the link goes with them
            subprocess.run(["ip", "netns", "del", host.name], capture_output=True)
        subprocess.run(["ip", "link", "del", first.interface], capture_output=True)
        signal.signal(signal.SIGTERM, before)


@contextmanager
def several_hosts(count: int, rate: str, inside: str = "") -> Iterator[tuple[Host, ...]]:
    """Namespaces on a switch, each behind a link of `rate` in each direction; removed after.

    Processes of one host share a link of the rate `inside`, by default as fast as the machine is.
    Leaves the program if they cannot be made, with the command that failed.
    """
    tag = f"ap{os.getpid()}"
    switch = f"{tag}-s"
    hosts = tuple(Host(f"{tag}-{n}", f"10.213.78.{n + 1}", f"{tag}v{n}") for n in range(count))
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # past `finally`
    try:
        _run("ip", "netns", "add", switch)
        _run("ip", "-n", switch, "link", "add", "br0", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "br0", "up")
        for number, host in enumerate(hosts):
            port = f"{tag}p{number}"
            _add(host)
            _run("ip", "link", "add", host.interface, "type", "veth", "peer", "name", port)
            _run("ip", "link", "set", host.interface, "netns", host.name)
            _run("ip", "link", "set", port, "netns", switch)
            _run("ip", "-n", switch, "link", "set", port, "master", "br0")
            _run("ip", "-n", switch, "link", "set", port, "up")
            within = ("ip", "-n", host.name)
            _run(*within, "addr", "add", f"{host.address}/24", "dev", host.interface)
            _run(*within, "link", "set", "lo", "up")
            _run(*within, "link", "set", host.interface, "up")
            _limit(host.name, host.interface, rate)
            _limit(switch, port, rate)
            if inside:
                _limit(host.name, "lo", inside)
        yield hosts
    finally:
        for name in (*(host.name for host in hosts), switch):  # the links go with them
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
        signal.signal(signal.SIGTERM, before)


def launch(hosts: Sequence[Host], each: int, command: Sequence[str]) -> int:
    """Run a command as `each` ranks on every host; the first exit status that is not 0."""
    running: list[subprocess.Popen[bytes]] = []
    try:
        for number, host in enumerate(hosts):
            for local in range(each):
                rank = {"RANK": number * each + local, "LOCAL_RANK": local}
                shared = {"WORLD_SIZE": len(hosts) * each, "LOCAL_WORLD_SIZE": each}
                there = {"MASTER_ADDR": hosts[0].address, "MASTER_PORT": PORT}
                given: Mapping[str, object] = {**rank, **shared, **there}
                environment = os.environ | {key: str(value) for key, value in given.items()}
                environment |= {"GLOO_SOCKET_IFNAME": host.interface, "OMP_NUM_THREADS": "1"}
                inside = ["ip", "netns", "exec", host.name]
                running.append(subprocess.Popen([*inside, *command], env=environment))
        return _end(running)
    finally:
        for process in running:
            if process.poll() is None:
                process.terminate()
        for process in running:
            process.wait()


def _end(running: Sequence[subprocess.Popen[bytes]]) -> int:
    """Wait until all are done or one has failed."""
    while True:
        codes = [process.poll() for process in running]
        failed = [code for code in codes if code]
        if failed or None not in codes:
            return failed[0] if failed else 0
        time.sleep(0.2)
