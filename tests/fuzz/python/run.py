# SPDX-License-Identifier: Apache-2.0
"""Fuzzes the readers of bytes from outside that are written in Python, guided by coverage.

Each `fuzz_NAME.py` beside this file is a target: its `one_input(data)` lets nothing but documented
errors pass, and its `SEEDS`, if it has them, are where the fuzzer begins. Needs atheris.

python tests/fuzz/python/run.py --seconds 300            # every target, one after the other
python tests/fuzz/python/run.py --seconds 300 slurm wire
"""

import argparse
import hashlib
import importlib
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def targets() -> list[str]:
    """Names of all targets."""
    return sorted(path.stem.removeprefix("fuzz_") for path in HERE.glob("fuzz_*.py"))


def fuzz(name: str, folder: Path, options: list[str]) -> None:
    """Fuzzes a target in this process; does not return.

    Args:
        name: Of the target.
        folder: For what it finds: a corpus, and inputs that fail as crash-*.
        options: Of libFuzzer.
    """
    import atheris

    sys.path.insert(0, str(HERE))
    with atheris.instrument_imports(include=["usbyte", f"fuzz_{name}"]):
        target = importlib.import_module(f"fuzz_{name}")
    corpus = folder / "corpus"
    corpus.mkdir(parents=True, exist_ok=True)
    for seed in getattr(target, "SEEDS", []):
        (corpus / hashlib.sha256(seed).hexdigest()).write_bytes(seed)
    atheris.Setup(
        [sys.argv[0], f"-artifact_prefix={folder}/", *options, str(corpus)], target.one_input
    )
    atheris.Fuzz()


def main() -> int:
    """Runs the targets one after the other, each in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", choices=[[], *targets()], metavar="NAME")
    parser.add_argument("--seconds", type=int, default=300, help="for each target")
    parser.add_argument("--out", type=Path, default=Path("build/fuzz/python"))
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    options = [f"-max_total_time={given.seconds}", "-timeout=20", "-rss_limit_mb=4096"]
    options += ["-max_len=65536", "-print_final_stats=1", "-verbosity=0"]
    if given.alone:
        fuzz(given.names[0], given.out / given.names[0], options)
    failed = []
    for name in given.names or targets():
        print(f"fuzzing {name} for {given.seconds} s", flush=True)
        command = [sys.executable, __file__, name, "--alone", "--out", str(given.out)]
        if subprocess.run([*command, "--seconds", str(given.seconds)], check=False).returncode:
            failed.append(name)
    if failed:
        print(f"failed: {', '.join(failed)}; inputs are in {given.out}/NAME/crash-*")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
