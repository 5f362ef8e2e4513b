"""aiperf: load on streams of conversations."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

REQUESTS = 40
NAME = "local/smollm2"


def cache(hub: Path) -> None:
    """Lays the tokenizer where one from a hub would be: of a path aiperf 0.13 makes such a name."""
    kept = hub / f"models--{NAME.replace('/', '--')}"
    (kept / "refs").mkdir(parents=True)
    (kept / "refs" / "main").write_text("0")
    (kept / "snapshots").mkdir()
    (kept / "snapshots" / "0").symlink_to(os.environ["TOKENIZER"])


def main() -> None:
    work = Path(os.environ["WORK"])
    cache(work / "hub")
    command = [
        *(str(Path(sys.executable).with_name("aiperf")), "profile"),
        *("--model", os.environ["MODEL"], "--tokenizer", NAME, "--use-server-token-count"),
        *("--url", os.environ["BASE_URL"].removesuffix("/v1"), "--endpoint-type", "chat"),
        *("--streaming", "--concurrency", "4", "--request-count", str(REQUESTS)),
        *("--isl", "64", "--osl", "16", "--random-seed", "1", "--ui-type", "none"),
        *("--extra-inputs", "ignore_eos:true", "--artifact-dir", str(work)),
        *("--no-gpu-telemetry", "--no-server-metrics"),
    ]
    environment = {**os.environ, "HF_HUB_CACHE": str(work / "hub")}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (found,) = work.glob("**/profile_export_aiperf.json")
    figures = json.loads(found.read_text())
    told = {
        name: figures[name]["avg"]
        for name in ("request_count", "output_sequence_length", "time_to_first_token")
    }
    assert told["request_count"] == REQUESTS, figures
    assert "error_request_count" not in figures, figures
    assert told["output_sequence_length"] == 16, told
    print(json.dumps(told))


if __name__ == "__main__":
    main()
