"""Peak memory of a process that decodes with one cache; decode.py runs it once per cache.

python benchmarks/peak_memory.py --model PATH --cache budget=1024 --seen 8192
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from contenders import Contender, contenders, load, quantizer
from synthetic import geometry_of

STEPS = 4


def peaks(source: str, seen: int, budgets: Sequence[int]) -> dict[str, int]:
    """Bytes by cache, `"weights only"` among them: each in a fresh process, in float32, batch 1."""
    return {
        contender.name: peak_of(source, contender)
        for contender in contenders(seen, budgets, quantizer() is not None, young=False)
        if not contender.over_blocks
    }


def peak_of(source: str, contender: Contender) -> int:
    options = ["--model", source, "--cache", contender.name, "--seen", str(contender.seen)]
    if contender.budget is not None:
        options += ["--budget", str(contender.budget)]
    done = subprocess.run(
        [sys.executable, str(Path(__file__).resolve()), *options],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"measuring the memory of {contender.name} failed:\n{done.stderr}")
    return int(json.loads(done.stdout.splitlines()[-1])["peak_bytes"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--cache", required=True)
    parser.add_argument("--seen", type=int, required=True)
    parser.add_argument("--budget", type=int)
    args = parser.parse_args()
    torch.set_num_threads(1)
    models = load(args.model, torch.float32)
    contender = Contender(args.cache, args.seen, args.budget)
    with torch.inference_mode():
        contender.refill(models, geometry_of(models.plain), room=STEPS)
        for _ in range(STEPS):
            contender.step(models, 1)
    print(json.dumps({"cache": args.cache, "seen": args.seen, "peak_bytes": peak_rss_bytes()}))


def peak_rss_bytes() -> int:
    """Peak resident memory of this process since it started its program.

    On Linux not by `getrusage`, which counts what the parent had at the fork as well.
    """
    status = Path("/proc/self/status")
    if status.exists():
        (line,) = (x for x in status.read_text().splitlines() if x.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


if __name__ == "__main__":
    main()
