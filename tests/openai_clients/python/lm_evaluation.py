"""lm-eval: a task of its own by `local-completions`, by log-likelihood and by text, and by `local-chat-completions`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

QUESTIONS = [
    {"question": "What is the capital of France?", "answer": "Paris"},
    {"question": "What is the capital of Italy?", "answer": "Rome"},
    {"question": "What is the capital of Spain?", "answer": "Madrid"},
]
TASK = """
task: capitals
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["\\n"], max_gen_toks: 24, temperature: 0.0}}
filter_list:
  - name: words
    filter:
      - {{function: regex, regex_pattern: "(Paris|Rome|Madrid)"}}
      - {{function: take_first}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""


def evaluated(work: Path, kind: str, path: str, *flags: str) -> float:
    address = os.environ["BASE_URL"] + path
    arguments = f"model={os.environ['MODEL']},base_url={address},num_concurrent=4,max_retries=1"
    if kind == "local-completions":
        arguments += f",tokenizer={os.environ['TOKENIZER']},tokenizer_backend=huggingface"
    output = work / kind
    command = [sys.executable, "-m", "lm_eval", "--model", kind, "--model_args", arguments]
    command += ["--tasks", "capitals", "--include_path", str(work), "--output_path", str(output)]
    done = subprocess.run([*command, *flags], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    (result,) = output.rglob("results_*.json")
    return float(json.loads(result.read_text())["results"]["capitals"]["exact_match,words"])


def main() -> None:
    work = Path(os.environ["WORK"])
    data = work / "capitals.jsonl"
    data.write_text("\n".join(json.dumps(each) for each in QUESTIONS))
    (work / "capitals.yaml").write_text(TASK.format(data=data))
    chat = evaluated(work, "local-chat-completions", "/chat/completions", "--apply_chat_template")
    text = evaluated(work, "local-completions", "/completions")
    # So small a model knows one of the capitals.
    assert chat > 0, chat
    print(json.dumps({"chat": chat, "text": text}))


if __name__ == "__main__":
    main()
