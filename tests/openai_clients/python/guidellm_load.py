"""guidellm: load on streams of conversations."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

REQUESTS = 40


def main() -> None:
    work = Path(os.environ["WORK"])
    command = [
        *(str(Path(sys.executable).with_name("guidellm")), "benchmark", "run"),
        *("--target", os.environ["BASE_URL"].removesuffix("/v1"), "--model", os.environ["MODEL"]),
        *("--processor", os.environ["TOKENIZER"], "--profile", "concurrent", "--rate", "4"),
        *("--data", "prompt_tokens=64,output_tokens=16", "--max-requests", str(REQUESTS)),
        *("--output-dir", str(work), "--outputs", "json", "--disable-console-interactive"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (found,) = work.rglob("*.json")
    (benchmark,) = json.loads(found.read_text())["benchmarks"]
    counts = benchmark["metrics"]["request_totals"]
    assert counts["errored"] == 0, counts
    assert counts["successful"] >= REQUESTS, counts
    print(json.dumps({"requests": counts}))


if __name__ == "__main__":
    main()
