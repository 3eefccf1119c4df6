"""The small part of CommonGen that is committed with the tests."""

import json
from pathlib import Path

FOLDER = Path(__file__).parent / "data" / "commongen"
FORMS = FOLDER / "concept_forms.json"


def read_pairs() -> tuple[list[str], list[str]]:
    """Conditions ("field, look, stand") and human sentences, one condition for each sentence."""
    lines = (FOLDER / "dev_200.jsonl").read_text(encoding="utf-8").splitlines()
    sets = [json.loads(line) for line in lines]
    pairs = [(", ".join(s["concepts"]), text) for s in sets for text in s["targets"]]
    return [condition for condition, _ in pairs], [text for _, text in pairs]
