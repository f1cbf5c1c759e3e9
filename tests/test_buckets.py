"""Plans of several lengths in one artefact: which of them a call takes, and in how much time. No GPU is needed."""
import ctypes
import itertools
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tvm_ffi

from schedules.artefact import export
from schedules.artefact.export import compile_entry
from schedules.artefact.manifest import describe
from schedules.artefact.variant import Tuned
from schedules.buckets import MOST_ROWS, Bucket, bucket_named, nearest
from schedules.lowering.toolkit import run_c_compiler
from schedules.plan import Calls, Plan
from te_defs.workload import Shape
from tests.stand_in_kernel import variant
from tests.test_variants import WORKLOAD, asked, call, code_for, link_numbers  # noqa: F401, a fixture

#: Sets of buckets: squares, decoding beside long prompts, neighbours, extremes.
SETS = {"squares": ("512", "4096", "16384"), "decoding": ("1x8192", "512", "4096", "1x128"), "neighbours": ("3", "4", "5x3", "3x5"),
        "extremes": ("1", "1000000000", "1x1000000000", "1000000000x1"), "ties": ("1x64", "64x1", "8", "16x4", "4x16")}


def buckets_of(name):
    return [bucket_named(text) for text in SETS[name]]


def numbered(buckets):
    """Variants that claim to be for a bucket each; their host functions come from `link_numbers`."""
    tuned = [Tuned(bucket, "stand-in", Plan(64, number), {}) for number, bucket in enumerate(buckets, 1)]
    return [replace(variant(None), tuned=(it,)) for it in tuned]


class TestNames:
    @pytest.mark.parametrize("text, bucket", [("512", (512, 512)), ("1x8192", (1, 8192)), ("1000000000", (MOST_ROWS,) * 2)])
    def test_of_lengths(self, text, bucket):
        found = bucket_named(text)
        assert (found.q_len, found.kv_len) == bucket and bucket_named(str(found)) == found

    @pytest.mark.parametrize("text", ["", "0", "00", "-1", "1x", "x1", "1x0", "1X2", "1x2x3", "1e3", "1.5", " 5", "5\n", "٣", "1000000001",
                                      "5x1000000001", "9" * 5000, "512x", "x"])
    def test_of_nothing_else(self, text):
        with pytest.raises(ValueError, match=r"(from 1 to 10\^9 are|such as 1x8192, or 512 for both,).* found "):
            bucket_named(text)


class TestNearest:
    """The rule, in Python; artefacts are held against it below."""

    @pytest.mark.parametrize("name, lengths, wanted", [
        ("squares", (1448, 1448), "512"), ("squares", (1449, 1449), "4096"), ("squares", (0, 0), "512"), ("squares", (8192,) * 2, "16384"),
        ("squares", (1, 8192), "4096"), ("squares", (1, 2**21), "16384"), ("decoding", (1, 1024), "1x8192"),
        ("decoding", (1, 1023), "1x128"), ("decoding", (64, 512), "512"),
        ("ties", (8, 8), "8"), ("ties", (1, 1), "64x1"), ("ties", (64, 64), "64x1"), ("neighbours", (0, 7), "3x5"),
        ("extremes", (2**40, 2**40), "1000000000"), ("extremes", (-5, 0), "1")])
    def test_by_ratio_and_of_equal_ones_the_larger(self, name, lengths, wanted):
        assert nearest(buckets_of(name), *lengths) == bucket_named(wanted)

    @pytest.mark.parametrize("name", SETS)
    def test_order_does_not_matter(self, name):
        rng = random.Random(name)
        for _ in range(50):
            shuffled, lengths = rng.sample(buckets_of(name), len(SETS[name])), [rng.randrange(200) for _ in range(2)]
            assert nearest(shuffled, *lengths) == nearest(buckets_of(name), *lengths)


def random_lengths(buckets, rng, count):
    """Lengths of all sizes; among them those of buckets, their neighbours, and what is as far from two of them."""
    edges = [0, 1, 2, MOST_ROWS, MOST_ROWS + 1, 2**31, 2**62, *(size + step for it in buckets for size in (it.q_len, it.kv_len)
                                                               for step in (-1, 0, 1))]
    edges += [int((a.q_len * b.q_len) ** 0.5) + step for a, b in itertools.combinations(buckets, 2) for step in (0, 1)]
    for _ in range(count):
        yield [rng.choice(edges) if rng.random() < 0.5 else int(2 ** rng.uniform(0, 31)) for _ in range(2)]


class TestEntry:
    """The same rule in C, on host functions that return their number."""

    @pytest.mark.parametrize("name", SETS)
    def test_takes_the_bucket_of_the_rule(self, tmp_path, name):
        variants = numbered(buckets_of(name))
        link_numbers(variants, tmp_path)
        ask = tvm_ffi.load_module(str(tmp_path / "numbers.so")).flash_attention_forward_bucket
        told = describe(WORKLOAD, variants)["buckets"]
        assert [(it["q_len"], it["kv_len"]) for it in told] == [(it.q_len, it.kv_len) for it in sorted(buckets_of(name),
                                                                                                    key=lambda it: it.size)]
        for lengths in random_lengths(buckets_of(name), random.Random(name), 4000):
            found, wanted = told[ask(*lengths)], nearest(buckets_of(name), *lengths)
            assert (found["q_len"], found["kv_len"]) == (wanted.q_len, wanted.kv_len), lengths

    @pytest.mark.parametrize("name", ["squares", "decoding", "ties"])
    def test_calls_go_there(self, asked, tmp_path, capfd, name):
        buckets = buckets_of(name)
        variants = [replace(code_for("it", "sm_80", MAX_ELEMENTS=2**60), tuned=it.tuned) for it in numbered(buckets)]
        forward, rng = link_numbers(variants, tmp_path), random.Random(name)
        lengths = [pair for pair in random_lengths(buckets, rng, 300) if pair[0] and max(pair) <= MOST_ROWS]
        for q_len, kv_len in lengths:
            wanted = buckets.index(nearest(buckets, q_len, kv_len)) + 1
            assert call(forward, "8.0", q_len=q_len, kv_len=kv_len) == wanted, (q_len, kv_len)
            assert call(forward, "8.0", q_len=q_len, kv_len=kv_len, scale=-1.0) == -wanted
        assert call(forward, "8.0", q_len=0) is None
        assert len(lengths) > 100 and capfd.readouterr() == ("", "")

    @pytest.mark.parametrize("arguments", [(), (1,), (1, 2, 3), (1.0, 2), ("1", 2), (None, None)])
    def test_what_is_no_length(self, tmp_path, arguments):
        link_numbers(numbered(buckets_of("squares")), tmp_path)
        ask = tvm_ffi.load_module(str(tmp_path / "numbers.so")).flash_attention_forward_bucket
        with pytest.raises(TypeError, match="flash_attention_forward: the query rows and key rows of a call are wanted, two ints, found"):
            ask(*arguments)

    def test_what_its_own_plan_cannot_take_goes_to_another_and_is_said(self, asked, tmp_path, capfd):
        small, large = buckets_of("squares")[:2]
        variants = [replace(code_for("narrow", "sm_80", MAX_ELEMENTS=1000), tuned=(Tuned(small, "n", Plan(1, 1), {}),)),
                    replace(code_for("wide", "sm_80"), tuned=(Tuned(large, "w", Plan(1, 1), {}),))]
        forward = link_numbers(variants, tmp_path)
        assert [call(forward, "8.0", q_len=n, kv_len=n) for n in (5, 30, 30, 4096)] == [1, 2, 2, 2]
        assert capfd.readouterr().err == ("flash_attention_forward: narrow for sm_80 cannot take this call (q has 1001 elements or more, "
                                          "wanted fewer): using wide for sm_80\n")

    def test_variants_for_any_length_keep_their_place(self, asked, tmp_path):
        """One for other chips behind, and one for few queries before those of the buckets."""
        small, large = buckets_of("squares")[:2]
        by_length = [replace(code_for("it", "sm_90a"), tuned=(Tuned(it, "it", Plan(1, 1), {}),)) for it in (small, large)]
        few = replace(code_for("few", "sm_90a"), serves=Calls(rows=8, strided=True, packed=True))
        forward = link_numbers([few, *by_length, code_for("old", "sm_80")], tmp_path)
        assert [call(forward, "9.0", q_len=n, kv_len=n) for n in (5, 20, 4000)] == [1, 2, 3]
        assert [call(forward, "8.0", q_len=n, kv_len=n) for n in (5, 20, 4000)] == [4, 4, 4]

    def test_one_for_several_buckets_and_calls(self, asked, tmp_path):
        """Within a bucket the first that is for a call serves, as in an artefact of its own."""
        small, middle, large = (Tuned(it, "it", Plan(1, 1), {}) for it in buckets_of("squares"))
        both, only = replace(code_for("both", "sm_80"), tuned=(small, large)), replace(code_for("only", "sm_80"), tuned=(middle,))
        forward = link_numbers([replace(both, serves=Calls(queries=100)), only, both], tmp_path)
        assert [call(forward, "8.0", q_len=n, kv_len=n) for n in (16, 512, 4096, 16384)] == [3, 1, 2, 1]

    @pytest.mark.parametrize("lengths", ["keys", "packed"])
    def test_lengths_are_the_most_that_the_host_knows(self, tmp_path, lengths):
        """Of batch entries with key lengths the rows of k, of packed sequences the rows of the longest, of queries and of keys."""
        workload = replace(WORKLOAD, lengths=lengths)
        forward = link_numbers(numbered([bucket_named(text) for text in ("4", "4x64", "64")]), tmp_path, workload)
        q, k, v, out, lse = (np.zeros(size, "float32") for size in Shape(2, 2, 2, 80, 80).tensors(WORKLOAD))
        if lengths == "keys":
            short = q[:, :5].copy(), k, v, out[:, :5].copy(), np.zeros((2, 2, 5), "float32")
            assert forward(*short, 1.0, np.array([1, 2], "int32")) == 2
            assert forward(q, k, v, out, lse, 1.0, np.array([1, 2], "int32")) == 3
            return
        tensors = (*(x[0] for x in (q, k, v, out)), lse[0])
        begins = [np.array(it, "int32") for it in ((0, 4, 8), (0, 5, 9), (0, 70, 75), (0, 5, 75))]
        assert [forward(*tensors, 1.0, *pair, 80) for pair in ((begins[0], begins[1]), (begins[0], begins[2]), (begins[3], begins[2]))] == [
            1, 2, 3]


SOURCES = Path(export.__file__).parent
#: Picks a million times among lengths that the compiler cannot foresee; nanoseconds each.
TIMER = """
#include <time.h>
#include "call.h"
double nanoseconds(long picks) {
  struct timespec begin, end;
  uint64_t state = 1;
  volatile long found = 0;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &begin);
  for (long i = 0; i < picks; ++i) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    found += nearest_bucket(state >> 40, state >> 50) - kBuckets;
  }
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &end);
  return ((end.tv_sec - begin.tv_sec) * 1e9 + (end.tv_nsec - begin.tv_nsec)) / picks;
}
"""


@pytest.mark.parametrize("count", [2, 16])
def test_picking_takes_less_than_a_microsecond(tmp_path, count, record_property):
    compile_entry(WORKLOAD, numbered([Bucket(2**number, 3 * number) for number in range(1, count + 1)]), tmp_path)
    source, library = tmp_path / "timer.c", tmp_path / "timer.so"
    stubs = "".join(f"int __tvm_ffi_{name}(void *s, const TVMFFIAny *a, int32_t n, TVMFFIAny *r) {{ return 0; }}\n" for name in (
        f"attention_forward{sign}{'' if place == 1 else f'_variant{place}'}" for place in range(1, count + 1)
        for sign in ("", "_negative_scale")))
    source.write_text(TIMER + stubs)
    includes = [f"-I{path}" for path in (tmp_path, SOURCES, tvm_ffi.libinfo.find_include_path(),
                                         tvm_ffi.libinfo.find_dlpack_include_path())]
    run_c_compiler(["-x", "c", "-std=gnu11", "-O2", "-fPIC", "-shared", *includes, str(source), "-o", str(library)])
    timer = ctypes.CDLL(str(library)).nanoseconds
    timer.restype = ctypes.c_double
    found = min(timer(10**6) for _ in range(3))
    record_property("nanoseconds", found)
    print(f"{found:.1f} ns to pick among {count} buckets")
    assert found < 1000
