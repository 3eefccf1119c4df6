"""The model card and the recipe's results, written from the report alone: no number is typed by hand.

python recipes/tiny/card.py src/nado/tiny/report.json --readme recipes/tiny/README.md
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nado.errors import InputError
from nado.storage import read_json

BEGIN, FINISH = "<!-- results: written by card.py -->", "<!-- end of results -->"

SOURCES = """| source | used for | licence |
|---|---|---|
| CommonGen v1.1, training sentences (Lin et al., 2020; INK-USC) | text and keyword prompts | MIT |
| Tatoeba, English side of Spanish–English pairs (tatoeba.org, manythings.org/anki) | text | CC BY 2.0 FR |
| COCO captions, training part (COCO Consortium; as distributed with Texygen) | text | CC BY 4.0 |
| SmolLM2-135M-Instruct (Hugging Face) | fine-tuned on the three; its sentences are text | Apache-2.0 |
"""

_CARD = """---
language: en
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
---

# nado's tiny English sentence model

A Llama of {parameters:,} parameters with its own byte-level vocabulary of {vocabulary:,} tokens. It writes
single everyday English sentences, for examples, tests and demonstrations of nado on a laptop. Float16 on
disk, float32 when loaded.

- `dog ball beach =` is continued with a sentence about these words (1 to 5 of them) and the end.
- An empty prompt gives any sentence; the beginning of a sentence is continued.

## How it was made

`recipes/tiny/` in nado's repository: {real:,} cleaned sentences; {teacher} fine-tuned on them; {drawn:,}
sentences drawn from that at temperature {temperature}, of which {kept:,} different ones passed the filters
(finished, readable, no repetitions, not held out); {steps:,} training steps on {tokens:,} tokens in
{seconds:.0f} s on {device}.

{sources}
## Measured on held-out sentences

{results}
Not for facts, advice or anything longer than a sentence. It repeats what its sources say, their names (Tom
and Mary, most of all) and their habits; vulgar words were removed from the training text by a short list,
which is no guarantee.
"""


def write_card(path: Path, report: dict[str, Any]) -> None:
    """The README that lies beside the weights."""
    left = report["stages"]["distilled"]["left"]
    tiny = report["stages"]["tiny"]
    settings = report["settings"]
    text = _CARD.format(
        parameters=tiny["parameters"],
        vocabulary=report["vocabulary"],
        real=report["train_sentences"],
        teacher="SmolLM2-135M-Instruct" if "smollm2" in settings["teacher"].lower() else settings["teacher"],
        drawn=left["drawn"],
        temperature=settings["temperature"],
        kept=left["likely"],
        steps=tiny["steps"],
        tokens=tiny["tokens"],
        seconds=tiny["seconds"],
        device=report["device"],
        sources=SOURCES,
        results=results_table(report),
    )
    path.write_text(text, encoding="utf-8")


def results_table(report: dict[str, Any]) -> str:
    """Perplexity and coverage of the tiny model and its teacher."""
    columns = [_column(report[name]) for name in ("tiny", "teacher")]
    lines = [f"| {name} | {columns[0][name]} | {columns[1][name]} |" for name in columns[0]]
    return "\n".join(["| | tiny | fine-tuned teacher |", "|---|---|---|", *lines, ""])


def _column(measured: dict[str, Any]) -> dict[str, str]:
    keyed, free = measured["after_keywords"], measured["free"]
    return {
        "parameters": f"{measured['parameters']:,}",
        "perplexity a word, after its keywords": f"{keyed['word']:.1f}",
        "perplexity a word, by itself": f"{free['word']:.1f}",
        "perplexity a token (own vocabulary), after its keywords": f"{keyed['token']:.2f}",
        "perplexity a token (own vocabulary), by itself": f"{free['token']:.2f}",
        f"keywords covered, {measured['sets']:,} held-out sets": f"{measured['coverage']:.1%}",
        "all keywords covered": f"{measured['all_covered']:.1%}",
        "ended within 32 tokens": f"{measured['ended']:.1%}",
    }


def results(report: dict[str, Any]) -> str:
    """What stands between the marks in the recipe's README."""
    tiny = report["tiny"]
    stages = ", ".join(f"{name} {facts['stage_seconds']:.0f} s" for name, facts in report["stages"].items())
    free = "\n".join(f"{at}. {text}" for at, text in enumerate(tiny["free_samples"], start=1))
    keyed = "\n".join(
        f"{at}. `{each['prompt']}` {each['text']}" for at, each in enumerate(tiny["keyword_samples"], start=1)
    )
    counts = report["stages"]["distilled"]["left"]
    left = ", ".join(f"{name.replace('_', ' ')} {count:,}" for name, count in counts.items())
    return (
        f"{results_table(report)}\n"
        f"On {report['device']}, {report['seconds']:.0f} s in all ({stages}). Sentences drawn and left after "
        f"each filter: {left}. Words are parted at blanks; the end counts as a token; one sample is "
        f"drawn for a set, and all are drawn from p itself (temperature 1): those below are the first that "
        f"came.\n\n"
        f"### Unfiltered samples, no prompt\n\n{free}\n\n"
        f"### Unfiltered samples after held-out keywords\n\n{keyed}\n"
    )


def fill(readme: Path, report: dict[str, Any]) -> None:
    """Put the results between the two marks of the README."""
    text = readme.read_text(encoding="utf-8")
    if text.count(BEGIN) != 1 or text.count(FINISH) != 1:
        raise InputError(f"the marks {BEGIN} and {FINISH}", f"not one of each in {readme}", "Put them back.")
    before, rest = text.split(BEGIN)
    after = rest.split(FINISH)[1]
    readme.write_text(f"{before}{BEGIN}\n\n{results(report)}\n{FINISH}{after}", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    """Fill the recipe's README, and write the card anew if asked to."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("report", type=Path, help="report.json of train_base.py")
    parser.add_argument("--readme", type=Path, help="the README to fill")
    parser.add_argument("--card", type=Path, help="the model card to write")
    options = parser.parse_args(arguments)
    report = read_json(options.report)
    if options.readme is not None:
        fill(options.readme, report)
    if options.card is not None:
        write_card(options.card, report)


if __name__ == "__main__":
    main()
