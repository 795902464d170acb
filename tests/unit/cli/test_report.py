"""The report of a small recorded run: right numbers, every plot, one file without network."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from xml.dom import minidom

import pytest
from recorded_run import group, run

from services.cli.report import from_folder
from trainer.report import build_report, write_report
from trainer.report.summary import calibration

PLOTS = {"accuracy", "rollouts", "histogram", "calibration", "gradient-norm", "entropy", "reward"}


@pytest.fixture(scope="module")
def report():
    return build_report(**run(), run={"versions": {"torch": "2.0"}})


@pytest.fixture(scope="module")
def page(report, tmp_path_factory):
    _, html = write_report(report, tmp_path_factory.mktemp("report"))
    return html.read_text()


def test_counts_and_curves(report):
    assert report["prompts"] == 20
    assert report["rollouts_fixed"] == 320
    assert report["rollouts"] == 100
    assert (report["accuracy_before"], report["accuracy_after"]) == (0.2, 0.7)
    assert [(p["step"], p["rollouts"]) for p in report["accuracy"]] == [(0, 0), (2, 50), (4, 100)]
    assert report["rollouts_per_prompt"] == {"mean": 5.0, "histogram": {"4": 16, "9": 4}, "fixed": 16}
    assert report["series"]["gradient_norm"] == [1.0, 2.0, 3.0, 4.0]
    assert report["series"]["rollouts_per_prompt"] == [5.0] * 4
    assert report["seconds"] == 63.5
    assert report["groups"] == {"submitted": 20, "trained": 20, "filtered": 0, "dropped": 0, "in_flight": 0}


def test_calibration_uses_only_the_first_look_and_the_groups_own_scale():
    # The five rewards after the first look would drag the observed rate to 1/9.
    lines = [group(0, "a", [1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0], prior=0.5)]
    found = calibration(lines)
    assert found["brier_prior"] == pytest.approx(0.25)
    assert found["bins"] == [{"low": 0.5, "high": 0.6, "predicted": 0.5, "observed": 0.5, "groups": 1}]
    scaled = calibration([group(0, "a", [1.0, 1.0, -1.0, -1.0], prior=0.5, low=-1.0)])
    assert scaled["bins"][0]["observed"] == 0.5


def test_the_running_mean_predicts_from_earlier_steps_only():
    lines = [
        group(0, "a", [1.0] * 4, prior=1.0),
        group(0, "b", [1.0] * 4, prior=1.0),
        group(1, "c", [1.0] * 4, prior=1.0),
    ]
    found = calibration(lines)
    assert found["brier_prior"] == 0.0
    assert found["brier_running_mean"] == pytest.approx((0.25 + 0.25 + 0.0) / 3)


def test_json_round_trips(report, tmp_path):
    data, _ = write_report(report, tmp_path)
    assert json.loads(data.read_text()) == report


def test_the_page_holds_every_plot_as_well_formed_svg_with_words(page):
    assert set(re.findall(r'<figure id="plot-([\w-]+)"', page)) == PLOTS
    drawings = re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL)
    assert len(drawings) == len(PLOTS)
    for drawing in drawings:
        root = minidom.parseString(drawing).documentElement
        assert root.getAttribute("role") == "img"
        words = {
            node.getAttribute("id"): node.firstChild.data
            for node in root.childNodes
            if node.nodeName in ("title", "desc")
        }
        assert root.getAttribute("aria-labelledby").split() == list(words)
        assert all(len(text) > 4 for text in words.values())
        assert "Nothing was recorded" not in drawing
    assert "after 4 steps (100 rollouts) 70.0%" in page


def test_the_page_needs_no_network_and_no_script(page):
    assert "<script" not in page
    assert not re.findall(r'(?:src|href)="(?!#)', page)
    assert "@import" not in page
    assert "prefers-color-scheme: dark" in page
    assert "currentColor" in page


def test_ids_are_unique_and_tags_are_closed(page):
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))

    class Balance(HTMLParser):
        def __init__(self):
            super().__init__()
            self.stack = []

        def handle_starttag(self, tag, attrs):
            if tag not in ("meta", "br"):
                self.stack.append(tag)

        def handle_startendtag(self, tag, attrs):
            pass

        def handle_endtag(self, tag):
            assert self.stack.pop() == tag

    parser = Balance()
    parser.feed(page)
    assert parser.stack == []


def test_texts_of_the_model_are_escaped(page):
    assert "7 &lt;i&gt;" in page
    assert "&lt;b&gt;What&lt;/b&gt;" in page
    assert "<b>What" not in page


def test_a_run_without_prior_evaluation_or_steps_still_has_its_page(tmp_path):
    nothing = build_report(
        job={"id": "job-0", "state": "failed", "spec": {}, "error": {"message": "no & data"}}, metrics=[], trail=[]
    )
    _, html = write_report(nothing, tmp_path)
    text = html.read_text()
    assert text.count("Nothing was recorded.") >= len(PLOTS)
    assert "no &amp; data" in text


def test_a_jobs_folder_gives_the_same_figures_and_skips_a_torn_line(report, tmp_path):
    recorded = run()
    for name in ("metrics", "trail"):
        text = "".join(json.dumps(line) + "\n" for line in recorded[name])
        (tmp_path / f"{name}.jsonl").write_text(text + '{"kind": "st')
    (tmp_path / "spec.json").write_text(json.dumps({"spec": recorded["job"]["spec"], "seed": 3}))
    found = build_report(**from_folder(tmp_path))
    for key in ("accuracy", "groups", "rollouts", "prompts", "calibration", "series", "policy", "seed"):
        assert found[key] == report[key], key
