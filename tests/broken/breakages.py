"""Deliberately broken kernels, and the laws that must notice: one text of one file each, and what is put in its place.

`promises.py` has more, of all code. `run.py` compiles each and runs its tests;
`tests/test_broken.py` sees that every text is still there.
"""

from __future__ import annotations

from typing import NamedTuple


class Law(NamedTuple):
    """Tests of one file, those that `-k` chooses. `file`: of a law, its name from the number on, else its path."""

    file: str
    chosen: str

    @property
    def path(self) -> str:
        """Below `tests`."""
        return f"laws/test_law_{self.file}.py" if self.file[0].isdigit() else f"{self.file}.py"


class Breakage(NamedTuple):
    """In `file` of the package, `put` for `find`, which occurs once; every one of `laws` must fail.

    `isa`: the instruction set whose kernels are broken; "": the highest of the machine.
    """

    name: str
    file: str
    find: str
    put: str
    laws: tuple[Law, ...]
    isa: str = ""


EXACT = Law("01_full_budget_is_exact", "every_executor and native")
ENTMAX = Law("01_full_budget_is_exact", "entmax_is_the_definition")
EMPTY = Law("01_full_budget_is_exact", "see_nothing")
AGREE = Law("02_impls_agree", "executors_agree_on_the_same_problem")
PREPARED = Law("02_impls_agree", "what_kernels_prepare_is")
ODD = Law("02_impls_agree", "odd_dimensions")
ROUNDED = Law("02_impls_agree", "rounding")
GRADIENTS = Law("02_impls_agree", "their_gradients_agree")
GRADCHECK = Law("02_gradients", "gradcheck")
PADDED = Law("03_masked_is_deleted", "native")
CAUSAL = Law("04_causal_means_causal", "native")
ALONE = Law("05_invariance", "native")
ONCE = Law("07_no_double_counting", "native")
WORK = Law("09_linear_cost", "compiled_kernels_are_linear and window")
SPLITS = Law("parts/test_cohorts", "kernel_splits")
SCANS = Law("02_impls_agree", "same_problem and scan")
RANGES = Law("parts/test_codes", "ranges_hold_every_key")
SUMS = Law("parts/test_cohorts", "kernel_adds_up")
APART = Law("parts/test_cohorts", "stay_where_they_are or smallest_scores")
SHARDS = Law("parts/test_distributed", "")
BIASED = Law("parts/test_distance_bias", "torch_is_the_reference")
TORCH_WORK = Law("09_linear_cost", "memory_and_operations and norm")

COHORTS = Law("02_impls_agree", "what_kernels_prepare_is and cohorts")
AROUND = Law("02_impls_agree", "executors_agree_on_the_same_problem and cohorts")

PARTS = Law("kernels/test_by_heads", "parts_are_the_whole")

NEAR, NEIGHBOURS = "native/near.h", "native/near_cohorts.h"

BREAKAGES = (
    Breakage(
        "causal edge of the band: one key later",
        NEIGHBOURS,
        "low = seen.begin + j - p.right - position,",
        "low = seen.begin + j - p.right - position - 1,",
        (CAUSAL, AGREE),
    ),
    Breakage(
        "far edge of the band: one key less",
        NEIGHBOURS,
        "high = seen.begin + j + p.left - position;",
        "high = seen.begin + j + p.left - position - 1;",
        (AGREE,),
    ),
    Breakage(
        "causal edge of the shared list",
        NEAR,
        "p.causal ? p.place[entry] : INT32_MIN;",
        "p.causal ? p.place[entry] - 1 : INT32_MIN;",
        (CAUSAL, AGREE),
    ),
    Breakage(
        "fillings of the shared list are seen",
        NEAR,
        "!p.used[entry] ? INT32_MAX : ",
        "",
        (AGREE, PADDED),
    ),
    Breakage(
        "tail tile of queries is left out",
        NEIGHBOURS,
        "tiles = divide_up(p.queries, TILE);",
        "tiles = p.queries / TILE;",
        (EXACT, AGREE),
    ),
    Breakage(
        "key head of a query head, by the remainder",
        NEIGHBOURS,
        "const int64_t key_head = head / p.asking, row",
        "const int64_t key_head = head % (p.heads / p.cohorts), row",
        (AGREE, ALONE),
    ),
    Breakage(
        "keys that are hidden from the band are seen",
        NEIGHBOURS,
        "uint32_t bits = bits_of(load(hidden + v) != vec{});",
        "uint32_t bits = 0;",
        (AGREE, PADDED, ONCE),
    ),
    Breakage(
        "cohorts: all query heads ask as the first of their key head",
        NEIGHBOURS,
        "p.query.at<T>(of / p.cohorts * p.asking + head, at)",
        "p.query.at<T>(of / p.cohorts * p.asking, at)",
        (COHORTS,),
    ),
    Breakage(
        "parts of heads: the output of some is written over that of the first",
        "execute/native/by_heads.py",
        "out = by_key_head[batch, heads].flatten(1, 2)",
        "out = by_key_head[batch, : heads.stop - heads.start].flatten(1, 2)",
        (PARTS,),
    ),
    Breakage(
        "parts of heads: sequences have the padding of the first",
        "core/inputs.py",
        "valid = None if self.valid is None else self.valid[batch]",
        "valid = None if self.valid is None else self.valid[: len(query)]",
        (Law("kernels/test_by_heads", "comes_with and lengths"),),
    ),
    Breakage(
        "parts of heads: random keys are drawn for each part",
        "execute/native/by_heads.py",
        " or x.generator is not None",
        "",
        (Law("kernels/test_by_heads", "no_parts"),),
    ),
    Breakage(
        "cohorts: lists hold keys of the first head",
        NEAR,
        "copy_rows(p.key.at<T>(head, p.place[c])",
        "copy_rows(p.key.at<T>(0, p.place[c])",
        (COHORTS,),
    ),
    Breakage(
        "cohorts: lists are those of the first cohort",
        NEIGHBOURS,
        "if (gathered != of) shared.gather(of), gathered = of;",
        "if (gathered != of) shared.gather(of - of % p.cohorts), gathered = of;",
        (COHORTS,),
    ),
    Breakage(
        "cohorts: a bound of the first scores that too few keys pass",
        "native/cohorts.h",
        "const ivec enough = above >= int32_t(p.count);",
        "const ivec enough = above >= int32_t(p.count) / 2;",
        (COHORTS,),
    ),
    Breakage(
        "keys of the list count twice in the window",
        NEAR,
        "if (p.used[c]) hidden[p.place[c]] = 1;",
        ";",
        (AGREE, ONCE, AROUND),
    ),
    Breakage(
        "neighbours: stand-ins speak for keys that the window keeps",
        NEIGHBOURS,
        "weights.mass[c * TILE + i] -= weights.part[c];",
        ";",
        (AGREE, ONCE, AROUND),
    ),
    Breakage(
        "padding is seen in the window",
        NEAR,
        "hidden[j] = !real[j];",
        "hidden[j] = 0;",
        (PADDED, AROUND),
    ),
    Breakage(
        "neighbours: what the cohort attends to is not weighed again",
        NEIGHBOURS,
        "const vec share = exponential(of_cohort - largest);",
        "const vec share = exponential(vec{});",
        (AROUND,),
    ),
    Breakage(
        "neighbours: the window ends one key too early",
        NEAR,
        "count = std::clamp<int64_t>(position + rows + p.right, begin, p.keys) - begin;",
        "count = std::clamp<int64_t>(position + rows - 1 + p.right, begin, p.keys) - begin;",
        (AROUND,),
    ),
    Breakage(
        "neighbours by torch: stand-ins speak for keys that the window keeps",
        "execute/torch/by_cohort.py",
        "represented - take(near.counts(s), place)",
        "represented",
        (AROUND,),
    ),
    Breakage(
        "shards: the keys after a shard are all of one cluster",
        "distributed/cohorts.py",
        "label=rows[..., -1].long()",
        "label=rows[..., -1].long().where(torch.arange(rows.shape[2]) < near.shape[2] - right, 0)",
        (SHARDS,),
    ),
    Breakage(
        "stand-ins of cohorts keep the mass that their mean key would give them",
        "native/cohort_means.h",
        "p.tilt * (p.level[first + c] - along - 0.5f * square)",
        "0.0f * (p.level[first + c] - along - 0.5f * square)",
        (PREPARED,),
    ),
    Breakage(
        "the first-order term of cohorts is not taken back where a value is right",
        "native/cohort_means.h",
        "-factor * std::clamp(x, -reach, reach)",
        "-0.0f * std::clamp(x, -reach, reach)",
        (PREPARED,),
    ),
    Breakage(
        "stand-ins of few keys vanish like those of none",
        NEAR,
        "constexpr float ROUNDING = 1e-5f;",
        "constexpr float ROUNDING = 0.3f;",
        (AGREE, ONCE),
    ),
    Breakage(
        "first-order slope without the factors",
        NEAR,
        "slope[w] += x * factor;",
        "slope[w] += x;",
        (AGREE,),
    ),
    Breakage(
        "sum of weights forgets earlier columns (lse)",
        "native/tile.h",
        "vec mass = sum[w];",
        "vec mass = {};",
        (EXACT, AGREE, ONCE),
    ),
    Breakage(
        "scores are not lowered by the largest (lse)",
        "native/tile.h",
        "const vec x = exponential(load(to) - largest);",
        "const vec x = exponential(load(to) - largest * 0.5f);",
        (AGREE,),
    ),
    Breakage(
        "exponential without its last coefficient",
        "native/lanes.h",
        "p = p * r + 0.166665211f;",
        "p = p * r + 0.16f;",
        (AGREE,),
    ),
    Breakage(
        "bfloat16 is cut off, not rounded",
        "native/lanes.h",
        "(bits + 0x7fff + ((bits >> 16) & 1)) >> 16",
        "bits >> 16",
        (ROUNDED,),
    ),
    Breakage(
        "last dimensions of a row are not transposed",
        "native/products.h",
        "into[d * pitch + i] = i < count ? to_float(rows[i][d]) * scale : 0.0f;",
        "into[d * pitch + i] = 0.0f * (i < count ? to_float(rows[i][d]) * scale : 0.0f);",
        (ODD,),
    ),
    Breakage(
        "gradients: none through stand-ins that a kernel has read",
        "execute/native/__init__.py",
        "if part.requires_grad}",
        'if part.requires_grad and "." not in name}',
        (GRADIENTS,),
    ),
    Breakage(
        "moments: what rounding leaves of equal queries becomes a covariance",
        "native/frame.h",
        "if (!(variance > 64 * std::numeric_limits<float>::epsilon() * size))",
        "if (false)",
        (Law("kernels/test_native", "it_is_the_reference"),),
    ),
    Breakage(
        "all queries: means are tilted as far as those of narrow cohorts",
        "sketch/cohorts.py",
        "return TILT if self.are_one else COHORT_TILT",
        "return COHORT_TILT",
        (Law("parts/test_stand_ins", "follow_their_equations"),),
    ),
    Breakage(
        "clusters: every key to the farthest centre",
        "native/keys.h",
        "const ivec closer = x > best;",
        "const ivec closer = (x < best) | (best == broadcast(-INFINITY));",
        (PREPARED,),
    ),
    Breakage(
        "clusters: centres are not divided by their mass",
        "native/lloyd.h",
        "centre[c * span + d] = sums[c * span + d] / mass[c];",
        "centre[c * span + d] = sums[c * span + d];",
        (PREPARED,),
    ),
    Breakage(
        "the frame: the mean key is not divided by how many there are",
        "native/frame.h",
        "p.mean[head * dim + d] = sums[d] / keys;",
        "p.mean[head * dim + d] = sums[d];",
        (PREPARED,),
    ),
    Breakage(
        "every tile multiplies with its band as often as there are tiles of keys",
        NEIGHBOURS,
        "dots(from, key_stride, seen.count,",
        "for (int64_t j = 0; j < p.keys; j += TILE) dots(from, key_stride, seen.count,",
        (WORK,),
    ),
    Breakage(
        "a selector that compares all pairs of keys",
        "select/controls.py",
        "norm: Tensor = torch.linalg.vector_norm(inputs.key.detach(), dim=-1, dtype=torch.float64)",
        "norm: Tensor = (inputs.key @ inputs.key.mT).square().sum(-1)",
        (TORCH_WORK,),
    ),
    Breakage(
        "entmax: a threshold that is too low (tau)",
        "core/entmax.py",
        "step = ((total - 1) / slope.clamp_min(tiny)).masked_fill_(slope == 0, 0.0)",
        "step = ((total - 1.01) / slope.clamp_min(tiny)).masked_fill_(slope == 0, 0.0)",
        (ENTMAX,),
    ),
    Breakage(
        "entmax: gradient without the mean",
        "core/entmax.py",
        "centred = grad - (u * grad).sum(-1, keepdim=True) / mass",
        "centred = grad - 0 * (u * grad).sum(-1, keepdim=True) / mass",
        (GRADCHECK,),
    ),
    Breakage(
        "softmax: rows that see nothing are not a number",
        "core/weights.py",
        "return top.masked_fill(top == -math.inf, 0.0)",
        "return top.clone()",
        (EMPTY,),
    ),
    Breakage(
        "cohorts: of equal numbers one fewer comes first",
        "native/cohorts.h",
        "is_one = (x < end) | (is_end & (ties > 0));",
        "is_one = (x < end) | (is_end & (ties > 1));",
        (SPLITS,),
    ),
    Breakage(
        "sums of cohorts: exponents without an upper end",
        "native/tilts.h",
        "x = x > p.largest ? broadcast(p.largest) : x;",
        "",
        (SUMS,),
    ),
    Breakage(
        "gradients of the sums of cohorts: the products have none",
        "sketch/tilted.py",
        "return Tilted(mass, energy, size, key_sum, value_sum, level, products)",
        "return Tilted(mass, energy, size, key_sum, value_sum, level, None)",
        (SUMS,),
    ),
    Breakage(
        "roots of metrics: of four rows one is not taken away",
        "native/products.h",
        "for (int r = 0; r < count; r++) left -= load(row + r * dim + d) * by[r];",
        "for (int r = 1; r < count; r++) left -= load(row + r * dim + d) * by[r];",
        (PREPARED,),
    ),
    Breakage(
        "threads that are late: one late start is enough",
        "native/team.h",
        "again = std::min(late, last.at(started));",
        "again = late;",
        (Law("kernels/test_native", "late_twice"),),
    ),
    Breakage(
        "the smallest of many numbers: one too many",
        "native/cohorts.h",
        "if (below == rank) {",
        "if (below == rank + 1) {",
        (SPLITS,),
    ),
    Breakage(
        "scans: a query chooses among the keys of its own block, too",
        "select/key_scan.py",
        "position.bitwise_and_(-BLOCK).clamp_max_",
        "position.bitwise_and_(-BLOCK).add_(BLOCK).clamp_max_",
        (RANGES, SCANS),
    ),
    Breakage(
        "scans: a past in parts goes on with the bound of one of them",
        "native/largest.h",
        "  void join(const Largest &later) {\n    least = INT16_MIN;\n",
        "  void join(const Largest &later) {\n",
        (Law("kernels/test_native_codes", "share_a_long_past"),),
    ),
    Breakage(
        "scans: levels of bytes keep what makes them positive",
        "native/byte_scores.h",
        "begin[i] = -3 * levels.unit * total;",
        "begin[i] = 0 * total;",
        (Law("kernels/test_native_codes", "keys_are_those_of_torch"),),
        isa="vnni",
    ),
    Breakage(
        "scans: ranges weigh the keys that the query keeps, too",
        "rest/base.py",
        "return size - kept.scatter_add_",
        "return size + 0 * kept.scatter_add_",
        (SCANS,),
    ),
    Breakage(
        "scans: two ranges begin at one block",
        "rest/block_means.py",
        "min(s, max(c, int(s ** (c / count) + 1e-9)))",
        "min(s, int(s ** (c / count) + 1e-9))",
        (RANGES,),
    ),
    Breakage(
        "scans: codes of one key head lie where those of two would",
        "native/code_scan.h",
        "p.packed.at<uint8_t>(head, 0)",
        "(const uint8_t *)p.packed.data + head * p.packed.head",
        (Law("parts/test_scan_streams", "heads_of_their_own"),),
    ),
    Breakage(
        "products of cohorts: every key weighs one",
        "native/tilts.h",
        "scale(&weighted[j * deep], sum_of_lanes(weight), deep)",
        "scale(&weighted[j * deep], 1.0f, deep)",
        (SUMS,),
    ),
    Breakage(
        "shards: cohorts forget the queries of earlier processes",
        "sketch/halves.py",
        "(before + total.cumsum(1) - total)",
        "(total.cumsum(1) - total)",
        (SHARDS,),
    ),
    Breakage(
        "shards: cohorts forget the queries of earlier heads",
        "sketch/halves.py",
        "(before + total.cumsum(1) - total)",
        "before",
        (APART, SHARDS),
    ),
    Breakage(
        "shards: of equal scores none goes left",
        "sketch/halves.py",
        "return (number < at_cut) | ((number == at_cut) & (place < _by_set(left, label)))",
        "return number < at_cut",
        (APART,),
    ),
    Breakage(
        "shards: importance in clusters of this process alone",
        "sketch/tilted.py",
        "totals.sum(here)",
        "here",
        (SHARDS,),
    ),
    Breakage(
        "a bias of the distance: a list's keys stay in the means of cohorts",
        "execute/torch/by_cohort.py",
        "left = mass - ((self.of_list",
        "left = mass - 0 * ((self.of_list",
        (BIASED,),
    ),
)
