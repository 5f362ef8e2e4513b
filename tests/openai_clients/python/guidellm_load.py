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
    model, address = os.environ["MODEL"], os.environ["BASE_URL"].removesuffix("/v1")
    command = [
        *(str(Path(sys.executable).with_name("guidellm")), "run", "--disable-console"),
        *("--backend", f"kind=openai_http,target={address},model={model}"),
        *("--tokenizer", f"kind=hf_auto,model={os.environ['TOKENIZER']}"),
        *("--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=16"),
        *("--profile", json.dumps({"kind": "concurrent", "streams": [4]})),
        *("--constraint", f"kind=max_requests,count={REQUESTS}"),
        *("--output", f"kind=json,path={work / 'report.json'}"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = work / "report.json"
    (benchmark,) = json.loads(found.read_text())["benchmarks"]
    counts = benchmark["metrics"]["request_totals"]
    assert counts["errored"] == 0, counts
    assert counts["successful"] >= REQUESTS, counts
    print(json.dumps({"requests": counts}))


if __name__ == "__main__":
    main()
