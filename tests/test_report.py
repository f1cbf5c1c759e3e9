"""The page that tells a tuning log: its form, its numbers, and what it makes of logs that are odd, torn or not there."""
import json
import re
import shutil
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest

from schedules import backward, build, registry, roofline
from schedules.arch import cuda_arch
from schedules.nest import loop_nest
from schedules.tuning import log, records
from schedules.tuning.log import Log, Outcome
from schedules.tuning.results import conclude
from schedules.tuning.search import Limits
from schedules.tuning.subjects import BackwardPass, ForwardPass, subject_named
from scripts import cli, figures
from scripts.page import STYLE, page
from scripts.report import REPORT, write_report
from scripts.story import read_story
from te_defs.workload import Shape, Workload, standard_shape, timed_arguments
from tests import stand_in
from tests.commands import command
from tests.fake_tuner import ARCH, SHAPE, SLUG, WORKLOAD, Clock, session

RECORDED = "fwd_d128_dv128_f16_causal"
HOPPER = cuda_arch("sm_90a")
DEVICE = "nvidia-h200"
#: Elements without an end tag.
VOID = {"meta"}
HOSTILE = "differs by 7 at <b onclick=\"x\">&amp;</b> \u2028\ud800 é ]]> http://example.org/x.js"


class Page(HTMLParser):
    """A page taken apart: tags, attributes, the values and the text of its parts by section; it must be well formed."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.open, self.tags, self.attributes, self.values, self.texts, self.section = [], [], [], {}, {}, None
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attributes.items()]
        self.section = attributes["id"] if tag == "section" else self.section
        if tag == "data":
            self.values.setdefault(self.section, []).append(float(attributes["value"]))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        self.handle_endtag(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts[self.section] = self.texts.get(self.section, "") + data

    def of(self, name):
        """Values of an attribute."""
        return [value for _, attribute, value in self.attributes if attribute == name]


def checked(text):
    """The Page of a text, which needs nothing else, no script, and can be read without seeing it."""
    found = Page(text)
    assert text.isascii() and not set(found.tags) & {"script", "link", "img", "iframe", "object", "base", "image", "use", "form"}
    assert not re.search(r"url\(|@import|expression", "".join(re.findall(r"<style>.*?</style>", text, re.DOTALL)))
    assert not [name for _, name, _ in found.attributes if name.startswith("on") or name in ("src", "xlink:href", "srcset", "action")]
    identifiers = found.of("id")
    assert len(set(identifiers)) == len(identifiers)
    assert {reference for text in found.of("aria-labelledby") for reference in text.split()} <= set(identifiers)
    assert {href.removeprefix("#") for href in found.of("href")} <= set(identifiers) and all(href[0] == "#" for href in found.of("href"))
    assert found.tags.count("svg") == found.of("role").count("img") == found.tags.count("desc")
    assert found.tags.count("h1") == found.tags.count("main") == 1 and ("html", "lang", "en") in found.attributes
    assert not re.search(r"\b(nan|inf|None)\b", "".join(value or "" for value in found.of("d")) + "".join(found.texts.values()))
    return found


@pytest.fixture(scope="module")
def recorded():
    """The recorded log with its page."""
    folder = cli.ROOT / "tuning_logs" / DEVICE / RECORDED
    story = read_story(folder)
    text = page(story)
    return SimpleNamespace(folder=folder, story=story, text=text, page=checked(text), run=json.loads((folder / log.RUN).read_text()),
                           measured=json.loads((folder / log.MEASURED).read_text()))


@pytest.fixture
def copied(tmp_path, recorded):
    """A copy of that log."""
    shutil.copytree(recorded.folder, tmp_path / "logs" / DEVICE / RECORDED, ignore=shutil.ignore_patterns(REPORT))
    return tmp_path / "logs" / DEVICE / RECORDED


def edit(path, change):
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


class TestOfARecordedLog:
    def test_shows_every_candidate_with_its_seconds_the_fastest_first(self, recorded):
        seconds = sorted(entry[2] for entry in recorded.measured["plans"])
        assert [value for value in recorded.page.values["candidates"] if 0 < value < 1] == seconds
        marks = re.findall(r'<(?:circle|path) class="(dot|winner|refused)"', recorded.text.split('id="limits"')[0])
        assert len(marks) == len(seconds) and marks.count("winner") == 1
        assert len(re.findall(r'<path class="line[ "]', recorded.text)) == len(seconds)

    def test_shows_the_winner(self, recorded):
        best = recorded.run["best"]
        assert recorded.page.values[None] == [best["seconds"], pytest.approx(1e9 * best["gflops"], rel=1e-6)]
        assert [best["registers"], best["spill_bytes"]] == recorded.page.values["winner"]
        told, key = recorded.page.texts["winner"], recorded.story.key
        family = registry.family_named(key[0])
        assert loop_nest(build.schedule(family, recorded.story.subject.workload, key[1])) in told
        assert all(f"{used} of {limit} {unit}" in told for _, used, limit, unit in recorded.story.parts[0].budget)
        assert "shared memory" in told and "sources as they are" not in told
        assert f"{1e3 * best['seconds']:.4f} ms" in recorded.text and f"{best['gflops'] / 1e3:.1f} TFLOP/s" in recorded.text

    def test_shows_the_limits_of_the_chip(self, recorded):
        limits = {limit.name: limit.seconds for limit in recorded.story.limits}
        assert recorded.page.values["limits"] == list(limits.values())
        assert recorded.story.tflops(limits["one after the other"]) == pytest.approx(HOPPER.peak.exp_bound_tflops(128, 128))
        assert f"{limits['tensor cores'] / recorded.run['best']['seconds']:.1%}" in recorded.page.texts["limits"]

    def test_shows_how_far_the_winner_is_from_each_peer(self, recorded):
        rows = {(row["length"], row["contestant"]): row
                for run in json.loads((recorded.folder.parent / "peers.json").read_text())["runs"] for row in run["rows"]
                if row["workload"] == RECORDED}
        assert rows
        for (length, _), row in rows.items():
            ratios = {row["ms"], row["ms"] / rows[length, "default"]["ms"]}
            ratios |= {row["ms"] / 1e3 / recorded.run["best"]["seconds"]} if length == 4096 else set()
            assert ratios <= set(recorded.page.values["peers"])
        assert all(f"{name} {rows[4096, name]['tflops']:.4g} TFLOP/s" in recorded.text for name in ("cuDNN", "FlashAttention-4"))

    def test_has_all_its_parts(self, recorded):
        assert list(recorded.page.texts)[1:] == ["search", "refused", "limits", "winner", "peers", "candidates", "sessions"]
        assert f"No candidate of {recorded.run['trials']} was refused" in recorded.page.texts["refused"]
        assert "The log tells no times" in recorded.page.texts["search"]
        session, *_ = recorded.run["sessions"]
        wanted = session["date"], session["commit"], str(session["seconds"]), *(f"{name} {it}" for name, it in session["versions"].items())
        assert all(text in recorded.page.texts["sessions"] for text in wanted)

    def test_is_the_same_each_time(self, recorded, copied):
        for name in ("peers.json", "bench.json", "backward.json"):
            shutil.copy(recorded.folder.parent / name, copied.parent)
        assert write_report(copied).read_text() == page(read_story(recorded.folder)) == recorded.text


@pytest.fixture
def families(monkeypatch):
    monkeypatch.setattr(registry, "FAMILIES", (stand_in,))


@pytest.fixture(scope="module")
def two_sessions(tmp_path_factory):
    """(folder of logs, what is known) after two sessions of the stand-in family, some of whose plans are wrong."""
    root, known, run = tmp_path_factory.mktemp("logs"), {}, None
    place = Log(root, SLUG, ForwardPass(WORKLOAD), ARCH)
    for trials in (5, 3):
        made = session(known=known, clock=Clock())
        winner = made.run(Limits(trials=trials))
        made.declarations[made.space_of(winner.key).name] = records.declaration_of(stand_in, WORKLOAD, winner.key[1])
        place.write_measured(known, made.declarations, SHAPE)
        conclude(place, made, SHAPE, run, winner, {"slug": SLUG, "name": "somelake"}, {"seed": 0})
        run = place.read_run()
    return root, known


class TestOfAFreshLog:
    @pytest.fixture
    def fresh(self, two_sessions, tmp_path, families):
        shutil.copytree(two_sessions[0], tmp_path / "logs")
        return tmp_path / "logs" / SLUG / WORKLOAD.name

    def test_time_goes_on_over_sessions(self, two_sessions):
        after = [outcome.after for outcome in two_sessions[1].values()]
        assert len(after) == 8 and all(earlier < later for earlier, later in zip(after, after[1:]))

    def test_shows_times_and_reasons(self, two_sessions, fresh):
        text = write_report(fresh).read_text()
        found, refused = checked(text), sum(outcome.refused is not None for outcome in two_sessions[1].values())
        assert refused and found.values["refused"] == [refused] and "wrong" in found.texts["refused"]
        assert "seconds of tuning" in found.texts["search"]
        assert text.split('id="limits"')[0].count('class="refused"') == refused
        assert "2 cores, vectors of 256 bits, 32 KiB of L1" in found.texts["limits"] and "GHz" in found.texts["limits"]
        assert "lanes" in found.texts["winner"] and "attn" in found.texts["winner"]

    def test_tells_who_measured_and_what_was_lost(self, fresh):
        lost = {"worker": "10.0.0.2:9091", "plan": "stand_in q_tile=16", "reason": "no answer within 60 s"}
        told = {"workers": ["10.0.0.2:9091 (a)", "10.0.0.3:9091 (b)"], "lost": [lost]}
        edit(fresh / log.RUN, lambda data: [each.update(fleet=told | {"lost": told["lost"][:number]})
                                            for number, each in enumerate(data["sessions"])])
        found = checked(write_report(fresh).read_text()).texts["sessions"]
        assert found.count("a fleet measured: 10.0.0.2:9091 (a), 10.0.0.3:9091 (b). Lost: ") == 2
        assert "Lost: none." in found and "Lost: 10.0.0.2:9091 with stand_in q_tile=16: no answer within 60 s." in found

    def test_shows_what_stands_in_the_log_as_text(self, fresh):
        edit(fresh / log.MEASURED, lambda data: [entry.__setitem__(3, HOSTILE) for entry in data["plans"] if entry[2] is None])
        edit(fresh / log.RUN, lambda data: data["device"].update(name=HOSTILE))
        found = checked(write_report(fresh).read_text())
        assert HOSTILE.replace("\ud800", "\ufffd") in found.texts["refused"] and "example.org" in found.texts[None]

    def test_without_a_session_that_ended_tells_why_each_was_refused(self, fresh):
        (fresh / log.RUN).unlink()
        edit(fresh / log.MEASURED, lambda data: data.update(plans=[[*entry[:2], None, f"wrong by 1e-{number}"]
                                                                  for number, entry in enumerate(data["plans"])]))
        found = checked(write_report(fresh).read_text())
        assert "No plan has won so far" in found.texts[None] and not {"winner", "sessions", "search", "candidates"} & set(found.texts)
        assert len(found.values["refused"]) == 1 and "wrong by 1e-0" in found.texts["refused"]

    def test_without_what_was_measured_tells_of_the_winner(self, fresh):
        (fresh / log.MEASURED).unlink()
        found = checked(write_report(fresh).read_text())
        assert "more were of families or plans that the sources no longer have" in found.texts[None]
        assert "attn" in found.texts["winner"] and "search" not in found.texts

    def test_of_a_cpu_of_which_the_log_tells_nothing(self, fresh):
        edit(fresh / log.RUN, lambda data: data["device"].pop("cpu"))
        found = checked(write_report(fresh).read_text())
        assert "there is no roofline" in found.texts["limits"] and "attn" in found.texts["winner"]

    @pytest.mark.parametrize("change, message", [
        (lambda best: best.update(declaration="1"), "the declaration has changed since it was measured"),
        (lambda best: best.update(family="gone"), "gone has no plan with these fields any more"),
        (lambda best: best["plan"].pop("q_tile"), "stand_in has no plan with these fields any more")])
    def test_of_other_sources_says_so(self, fresh, change, message):
        edit(fresh / log.RUN, lambda data: change(data["best"]))
        found = checked(write_report(fresh).read_text())
        assert message in found.texts["winner"]
        assert ("attn" in found.texts["winner"]) == ("declaration" in message)


@pytest.mark.parametrize("order, family", [(backward.IN_ORDER, "mma_backward"), (backward.ANY_ORDER, "wgmma_fused_backward")])
def test_of_gradients(tmp_path, recorded, order, family):
    """Of a log that is made up, beside a real benchmark of the same gradients in any order."""
    subject, module = BackwardPass(Workload(128, 128), order), backward.family_named(order, family)
    key, shape = (family, backward.default_plans(module, Workload(128, 128), HOPPER)), standard_shape(Workload(128, 128), 4096)
    place = Log(tmp_path, DEVICE, subject, HOPPER)
    spaces = [space for spaces in subject.parts((module,), HOPPER).values() for space in spaces]
    known = {(space.family.NAME, plan): Outcome(1e-3 * (number + rank), None, 255, 4, 1.0 * rank)
             for number, space in enumerate(spaces, 1) for rank, plan in enumerate(space.fitting_plans()[:3])}
    place.write_measured(known, {}, shape)
    best = {"family": family, "plan": key[1].values(), "seconds": 1.5e-3, "measured": "duel",
            "declaration": subject.declaration_of(key, HOPPER)}
    place.write_run({"workload": subject.name, "arch": "sm_90a", "device": {"slug": DEVICE, "name": "NVIDIA H200"},
                     "shape": log.data_of(shape), "best": best, "trials": len(known), "sessions": []})
    shutil.copy(recorded.folder.parent / "backward.json", tmp_path / DEVICE)
    found = checked(write_report(place.path).read_text())
    assert "sources as they are" not in found.texts["winner"]
    for name, plan in subject.split(key).values():
        assert name in found.texts["winner"] and name in found.texts["candidates"]
    assert found.texts["winner"].count("attn") == len(subject.split(key))
    assert ("Each candidate is a whole gradient" in found.texts["candidates"]) == (order == backward.IN_ORDER)
    assert ("cuDNN" in found.texts.get("peers", "")) == (order == backward.ANY_ORDER)
    assert len([value for value in found.values["candidates"] if value < 1]) == len(known)


class TestRefused:
    def refused(self, *arguments):
        done = command("report", *arguments, code=cli.USAGE)
        assert len(done.stderr.splitlines()) == 1 and done.stderr.startswith("error: ")
        return done.stderr

    @pytest.mark.parametrize("name, text, message", [
        (log.MEASURED, '{"schema": 1, "workl', "must be JSON, found"), (log.MEASURED, '{"schema": 1}', "measured.json must be of"),
        (log.RUN, "", "must be JSON, found"), (log.RUN, "[]", "must hold an object, found list"),
        (log.RUN, '{"schema": 1}', "must have 'workload' of type str"), (log.RUN, "\x80", "must be")])
    def test_a_torn_log_writes_nothing_at_all(self, copied, name, text, message):
        (copied / name).write_bytes(text.encode("latin-1"))
        before = sorted(copied.parent.rglob("*"))
        assert message in self.refused("--logs", copied.parent.parent)
        assert sorted(copied.parent.rglob("*")) == before

    def test_a_torn_log_beside_a_sound_one_writes_nothing_either(self, copied):
        shutil.copytree(copied, copied.with_name("fwd_d64_dv64_f16_full"))
        assert "fwd_d64_dv64_f16_full/measured.json must be of" in self.refused("--logs", copied.parent.parent)
        assert not list(copied.parent.rglob(REPORT))

    def test_an_odd_target_is_said_to_be(self, copied):
        edit(copied / log.RUN, lambda data: data.update(arch="sm_1"))
        assert "must name a target and a shape" in self.refused("--logs", copied.parent.parent)

    @pytest.mark.parametrize("arguments, message", [
        (("--workload", "d64_f16_casual"), "correct the name, or name a preset"),
        (("--workload", "d64_f16_full"), f"a tuning log of fwd_d64_dv64_f16_full was wanted, found {RECORDED} in"),
        (("--workload", "bwd_nonsense"), f"a tuning log of bwd_nonsense was wanted, found {RECORDED} in"),
        (("--logs", "/nowhere/at/all"), "--logs must be a folder"),
        (("--output", "/nowhere/at/all.html"), "--output must be a file in a folder that exists")])
    def test_bad_arguments(self, copied, arguments, message):
        assert message in self.refused("--logs", copied.parent.parent, *arguments)
        assert not (copied / REPORT).exists()

    def test_no_log_at_all_and_one_that_is_named_for_nothing(self, tmp_path, copied):
        (tmp_path / "none").mkdir()
        assert "tuning logs were wanted, found none" in self.refused("--logs", tmp_path / "none")
        copied.rename(copied.with_name("something"))
        assert "a log is named like fwd_d128_dv128_f16_causal" in self.refused("--logs", copied.parent.parent)

    def test_one_file_for_several_pages(self, copied):
        shutil.copytree(copied, copied.with_name("fwd_d64_dv64_f16_full"))
        told = self.refused("--logs", copied.parent.parent, "--output", copied.parent / "page.html")
        assert "--output takes the page of one log, found" in told

    def test_a_write_that_fails_leaves_the_page_that_was_there(self, copied, monkeypatch):
        (copied / REPORT).write_text("before")
        monkeypatch.setattr(log.os, "replace", lambda *paths: (_ for _ in ()).throw(OSError("disk full")))
        assert "disk full" in command("report", "--logs", copied.parent.parent, code=cli.FAILED).stderr
        assert (copied / REPORT).read_text() == "before" and not list(copied.glob(".writing-*"))

    def test_benchmarks_that_are_none_are_left_out_and_said(self, copied):
        odd = "{", '{"rows": [{}]}', '{"runs": 3}', '{"rows": 1, "device": "NVIDIA H200", "command": "\'"}', "[]", '{"other": 1}'
        for number, text in enumerate(odd):
            (copied.parent / f"odd{number}.json").write_text(text)
        told = checked(write_report(copied).read_text()).texts["peers"]
        found = re.findall(r"(odd\d)\.json is not what scripts.bench --json writes and was left out", told)
        assert found == ["odd0", "odd1", "odd2", "odd3", "odd4"]


class TestWork:
    @pytest.mark.parametrize("name", [RECORDED, "fwd_d64_dv64_f32_full", "fwd_d192_dv128_bf16_window", "bwd_d128_dv128_f16_causal"])
    def test_bounds_are_those_of_the_peak(self, name):
        subject = subject_named(name)
        workload, shape, peak = subject.workload, standard_shape(subject.workload, 512), HOPPER.peak
        work = roofline.work_of(subject, shape)
        products, exponentials, together, memory = (limit.seconds for limit in roofline.limits_of(peak, work))
        assert together == products + exponentials and memory == work.bytes / 4.8e12
        assert exponentials == pytest.approx(work.exponentials / (16 * 132 * 1.83e9))
        if subject.order is None and work.tensor_cores:
            assert work.operations / together / 1e12 == pytest.approx(peak.exp_bound_tflops(workload.head_dim, workload.value_dim))

    def test_counts_each_tensor_once(self):
        subject = ForwardPass(Workload(64, 32, "float16", "full", "bias", True))
        shape = Shape(2, 4, 2, 10, 20)
        behind = sum(array.nbytes for array in timed_arguments(subject.workload, shape) if hasattr(array, "nbytes"))
        own = 2 * (2 * 10 * 4 * (64 + 32) + 2 * 20 * 2 * (64 + 32)) + 4 * 2 * 4 * 10
        assert roofline.work_of(subject, shape).bytes == own + behind
        assert roofline.work_of(BackwardPass(subject.workload), shape).bytes == 2 * own - 4 * 2 * 4 * 10 + behind


def luminance(colour):
    parts = [int(part * (2 if len(part) == 1 else 1), 16) / 255 for part in re.findall("." if len(colour) == 3 else "..", colour)]
    return sum(weight * (x / 12.92 if x <= 0.03928 else ((x + 0.055) / 1.055)**2.4) for weight, x in zip((0.2126, 0.7152, 0.0722), parts))


@pytest.mark.parametrize("theme", re.findall(r":root\{.*?\}", STYLE), ids=["light", "dark", "print"])
def test_text_and_marks_stand_out_from_the_page(theme):
    """WCAG 2.1: 4.5 to 1."""
    colours = dict(re.findall(r"--(\w+):#([0-9a-f]+)", theme))
    for front in ("ink", "soft", "main", "bad"):
        for back in ("page", "panel"):
            high, low = sorted((luminance(colours[front]), luminance(colours[back])), reverse=True)
            assert (high + 0.05) / (low + 0.05) >= 4.5, (front, back)


class TestAxis:
    @pytest.mark.parametrize("low, high, log", [(0.4, 0.6, False), (0, 1, False), (1e-6, 3e-6, False), (2, 7, True), (1e-3, 4e4, True)])
    def test_ticks_are_few_round_and_within(self, low, high, log):
        ticks = figures.Axis(low, high, 0, 100, log).ticks()
        assert 2 <= len(ticks) <= 10 and all(low <= tick * (1 + 1e-9) and tick <= high * (1 + 1e-9) for tick in ticks)
        assert all(re.fullmatch(r"0\.0+|[1-9](\.[0-9]{1,2})?0*", f"{tick:.9e}".split("e")[0]) for tick in ticks)

    @pytest.mark.parametrize("seconds, told", [(4.2e-4, "0.4200 ms"), (5.614e-5, "56.14 µs"), (1.2, "1.200 s"), (1e-9, "0.001000 µs")])
    def test_times_have_four_digits_and_a_unit(self, seconds, told):
        assert figures.time_unit(seconds).told(seconds) == told
