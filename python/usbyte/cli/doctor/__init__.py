# SPDX-License-Identifier: Apache-2.0
"""`usbyte doctor`: checks whether usbyte works on this machine, and gives remedies."""

import importlib
import platform
import sys
import time
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import click

import usbyte
from usbyte import cluster_env
from usbyte.cli.doctor import machine, nccl, selftest
from usbyte.cli.doctor.findings import Finding, guarded, show

_REINSTALL = f"{sys.executable} -m pip install --force-reinstall --no-deps usbyte"


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option(
    "--timeout",
    default=120.0,
    show_default=True,
    type=click.FloatRange(min=0, min_open=True),
    help="Time limit of the self-test, in seconds.",
)
def doctor(as_json: bool, timeout: float) -> None:
    """Report versions, devices, network and settings, and run a self-test.

    The self-test is a real all_reduce of two processes over loopback. The exit status is 1 if
    something is broken; each broken line has a remedy.
    """
    findings = list(_examine(timeout))
    show(findings, as_json)
    if any(finding.status == "broken" for finding in findings):
        sys.exit(1)


def _examine(timeout_s: float) -> Iterator[Finding]:
    core, core_error = _import("usbyte._core")
    torch, torch_error = _import("torch")
    yield Finding("versions", "usbyte", usbyte.__version__)
    yield from guarded("versions", lambda: _extension(core, core_error))
    yield from guarded("versions", lambda: _torch(torch, torch_error))
    yield Finding("versions", "python", f"{platform.python_version()}, {sys.executable}")
    yield from guarded("CUDA", lambda: _cuda(core, torch))
    yield from guarded("NCCL", lambda: nccl.libraries(torch))
    yield from guarded("machine", machine.hardware)
    yield from guarded("network", machine.interfaces)
    yield from guarded("job", _job)
    yield from guarded("variables", lambda: _variables(core))
    yield from _self_test(core is not None and torch is not None, timeout_s)


def _import(name: str) -> tuple[Any, str]:
    """Returns the module and "", or None and the reason why it cannot be imported."""
    try:
        return importlib.import_module(name), ""
    except Exception as error:  # A broken shared library can raise more than ImportError.
        return None, f"cannot be imported: {type(error).__name__}: {error}"


def _extension(core: Any, error: str) -> Iterator[Finding]:
    if core is None:
        yield Finding("versions", "extension", error, "broken", f"Reinstall: {_REINSTALL}")
        return
    build = core.build_info()
    if build["version"] == usbyte.__version__:
        yield Finding("versions", "extension", f"{build['version']}, {build['compiler']}")
    else:
        text = f"{build['version']} does not belong to usbyte {usbyte.__version__}"
        yield Finding("versions", "extension", text, "broken", f"Reinstall: {_REINSTALL}")
    yield Finding("versions", "CUDA part", build["cuda"])


def _torch(torch: ModuleType | None, error: str) -> Iterator[Finding]:
    if torch is None:
        remedy = f"Install it: {sys.executable} -m pip install 'torch>=2.4'"
        yield Finding("versions", "torch", error, "broken", remedy)
        return
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    text = f"{torch.__version__}, {built}"
    if (major, minor) < (2, 4):
        remedy = f"Upgrade it: {sys.executable} -m pip install --upgrade 'torch>=2.4'"
        yield Finding("versions", "torch", f"{text}: too old", "broken", remedy)
    elif not torch.distributed.is_available():
        remedy = "Install a torch that is built with USE_DISTRIBUTED=1."
        yield Finding("versions", "torch", f"{text}: no torch.distributed", "broken", remedy)
    else:
        yield Finding("versions", "torch", text)
        yield from _torch_internals()


def _torch_internals() -> Iterator[Finding]:
    from usbyte.torch.torch_private import broken

    changed = broken()
    for what in changed:
        remedy = "Report it with this page, and use the latest torch that usbyte was tested with."
        yield Finding("versions", "torch internals", f"changed: {what}", "broken", remedy)
    if not changed:
        yield Finding("versions", "torch internals", "as usbyte expects")


def _cuda(core: Any, torch: ModuleType | None) -> Iterator[Finding]:
    if core is None:
        yield Finding("CUDA", "devices", "not known without the extension")
        return
    info = core.cuda_info()
    if info.built:
        yield Finding("CUDA", "runtime", info.runtime_version)
    elif torch is not None and torch.version.cuda is not None:
        text = "torch has CUDA, this build of usbyte has not"
        yield Finding("CUDA", "runtime", text, "warning", info.reason)
    yield Finding("CUDA", "driver", info.driver_version or "none")
    for index, device in enumerate(info.devices):
        memory = f"{device.memory_bytes / 2**30:.1f} GiB"
        text = f"{device.name}, compute capability {device.compute_capability}, {memory}"
        yield Finding("CUDA", f"device {index}", text)
    if not info.devices:
        yield Finding("CUDA", "devices", f"none: {info.reason}")


def _job() -> Iterator[Finding]:
    try:
        cluster = cluster_env.detect()
    except ImportError:
        yield Finding("job", "place", "not known without the extension")
    except RuntimeError as error:
        what, _, remedy = str(error).partition(". ")
        yield Finding("job", "place", what, "broken", remedy)
    else:
        local = [cluster.local_rank, cluster.local_size]
        texts = ["not set" if number is None else str(number) for number in local]
        place = f"rank {cluster.rank} of {cluster.size}, local {' of '.join(texts)}, "
        place += f"from: {cluster.source}"
        yield Finding("job", "place", place)


def _variables(core: Any) -> Iterator[Finding]:
    raw = cluster_env.usbyte_variables()
    if core is None:
        for name, text in raw.items():
            yield Finding("variables", name, f"{text} (set; not checked without the extension)")
        return
    try:
        known = core.Env.read().variables
    except RuntimeError as error:
        yield Finding("variables", "USBYTE_*", str(error), "broken", "Correct or unset it.")
        for name, text in raw.items():
            yield Finding("variables", name, f"{text} (set)")
        return
    for variable in known:
        text = f"{variable.value or '-'} {variable.unit}".strip()
        yield Finding("variables", variable.name, f"{text} (set)" if variable.set else text)


def _self_test(possible: bool, timeout_s: float) -> Iterator[Finding]:
    name = "2-rank all_reduce"
    if not possible:
        text = "not run: the extension or torch cannot be imported"
        yield Finding("self-test", name, text, "warning")
        return
    begin = time.monotonic()
    try:
        problem = selftest.run(timeout_s)
    except OSError as error:
        problem = f"cannot be started: {error}"
    if problem:
        by_hand = "'from usbyte.cli.doctor.selftest import worker; worker()'"
        remedy = (
            "Look for a firewall or a container without 127.0.0.1; all of its output is shown by: "
            f"usbyterun -np 2 {sys.executable} -c {by_hand}"
        )
        yield Finding("self-test", name, problem, "broken", remedy)
    else:
        yield Finding("self-test", name, f"works, {time.monotonic() - begin:.1f} s")
