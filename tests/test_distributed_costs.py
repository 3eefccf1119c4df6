"""The cost model agrees with what was measured, and its page with the cost model."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from nado.distributed.costs import (
    BASES,
    BEGIN,
    LARGE,
    MEASURED,
    TASK,
    Speeds,
    Task,
    estimate_costs,
    main,
    update_page,
)
from nado.errors import InputError

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
SPEEDS = Speeds.measured(RESULTS)


def measured(name: str) -> dict[str, float]:
    found: dict[str, float] = json.loads((RESULTS / f"{name}.json").read_text())["metrics"]
    return found


def test_the_page_is_the_one_that_is_made_from_the_results() -> None:
    page = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")
    assert update_page(page, RESULTS) == page


def test_the_numbers_in_the_pages_words_are_those_of_the_results() -> None:
    page = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8").partition(BEGIN)[0]
    training = measured("training")
    speeds = (
        measured("drawing")["tokens_per_s_h200"],
        training["tokens_per_s_h200"],
        training["tokens_per_s_h200_uncached"],
        measured("labeling")["texts_per_s_1core"],
    )
    for speed in speeds:
        assert f"{speed:,.0f}" in page
    peak = 989e12  # bfloat16 operations a second of an H200, as its maker states them
    assert f"{SPEEDS.draw / peak:.0%}".replace("%", " %") in page


def test_the_measured_base_costs_what_was_measured() -> None:
    task = Task(1000, 10, 50, passes=1)  # half a million tokens
    costs = estimate_costs(MEASURED, task, SPEEDS)
    training = measured("training")
    assert costs.draw * 3600 == pytest.approx(5e5 / measured("drawing")["tokens_per_s_h200"])
    assert costs.train * 3600 == pytest.approx(5e5 / training["tokens_per_s_h200"])
    assert (costs.read + costs.train) * 3600 == pytest.approx(5e5 / training["tokens_per_s_h200_uncached"])
    assert costs.label * 3600 == pytest.approx(1e4 / measured("labeling")["texts_per_s_1core"])


@pytest.mark.parametrize("base", BASES, ids=lambda base: base.name)
def test_costs_grow_with_the_task_and_hours_fall_with_gpus(base: object) -> None:
    small, large = (estimate_costs(base, task, SPEEDS) for task in (TASK, LARGE))  # type: ignore[arg-type]
    ratio = LARGE.tokens_in_all / TASK.tokens_in_all
    assert large.draw / small.draw == pytest.approx(ratio)
    totals = [sum(small.hours(gpus).values()) for gpus in (8, 64, 1000)]
    assert totals == sorted(totals, reverse=True)
    assert small.hours(1000)["draw"] * 1000 >= small.draw * 0.999  # never faster than all of them at work


def test_a_base_of_two_gpus_does_not_fit_one_and_costs_twice_as_much_to_draw_from() -> None:
    large = BASES[-1]
    alone = estimate_costs(replace(large, gpus=1), TASK, SPEEDS)
    costs = estimate_costs(large, TASK, SPEEDS)
    assert costs.hours(1) == {}
    assert costs.draw == pytest.approx(2 * alone.draw)
    assert costs.hours(1000)["draw"] > alone.hours(1000)["draw"]


def test_more_gpus_than_shards_draw_no_faster() -> None:
    costs = estimate_costs(MEASURED, TASK, SPEEDS)
    assert costs.shards == math.ceil(32e6 / (16 * 8192))
    assert costs.hours(1000)["draw"] == costs.hours(10**6)["draw"] == pytest.approx(costs.draw / costs.shards)


def test_a_base_is_read_for_every_pass_where_its_states_have_no_room() -> None:
    costs = estimate_costs(BASES[1], TASK, SPEEDS)
    assert costs.hours(1)["read"] == pytest.approx(3 * costs.read)
    assert costs.hours(1000)["read"] == pytest.approx(costs.read / 1000)


def test_a_run_of_ones_own_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    main([str(RESULTS), "--prompts", "2000", "--samples", "8", "--tokens", "20", "--passes", "1"])
    printed = capsys.readouterr().out
    assert "**2,000 prompts × 8 samples × 20 tokens: what it takes in all**" in printed
    assert len(re.findall(r"^\| 7B, extrapolated", printed, re.M)) == 5


def test_a_page_without_a_place_for_the_tables_is_refused() -> None:
    with pytest.raises(InputError, match="Put both where the tables go"):
        update_page("# Scale\n", RESULTS)
