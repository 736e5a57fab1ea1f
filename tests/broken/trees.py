"""The kernels of trees of keys, broken in one place each, and the laws that must notice."""

from broken.breakages import AGREE, CAUSAL, GRADIENTS, ONCE, PREPARED, Breakage, Law

TREE_GRADIENTS = Law("02_impls_agree", "gradients_through_what_kernels_prepare and tree")
FOUND = Law("kernels/test_native_tree", "find_what_torch_finds and long")

DESCEND = "native/descender.h"

TREES = (
    Breakage(
        "trees: one key too many is near",
        DESCEND,
        "const vec x = last[w] > at ? load(to) : broadcast(-INFINITY);",
        "const vec x = last[w] >= at ? load(to) : broadcast(-INFINITY);",
        (CAUSAL, AGREE),
    ),
    Breakage(
        "trees: opened nodes stand in as well",
        DESCEND,
        "const bool stays = p.shown && place[c] >= beam;",
        "const bool stays = p.shown;",
        (AGREE, ONCE),
    ),
    Breakage(
        "trees: all query heads ask as the first of their key head",
        DESCEND,
        "const int64_t h = head * p.gqa_ratio + (first + i) / length, n",
        "const int64_t h = head * p.gqa_ratio, n",
        (AGREE,),
    ),
    Breakage(
        "trees: ranks reach one deviation far, however many keys a node has",
        DESCEND,
        "const float reach = (1 + std::log2((float)level.size)) / 2, size",
        "const float reach = 1.0f, size",
        (FOUND,),
    ),
    Breakage(
        "trees: ranks reach half as far",
        DESCEND,
        "const float reach = (1 + std::log2((float)level.size)) / 2, size",
        "const float reach = (1 + std::log2((float)level.size)) / 4, size",
        (FOUND,),
    ),
    Breakage(
        "trees: masses of the last nodes of a level are their logarithms",
        DESCEND,
        "const int whole = (count + LANES - 1) / LANES * LANES;\n    float top",
        "const int whole = count / LANES * LANES;\n    float top",
        (Law("kernels/test_native_tree", "stop_where_those_of_torch_stop"),),
    ),
    Breakage(
        "trees, gradients: spreads count where they are cut off",
        "native/descend_back.h",
        "slope[c] = closed.at[c].spread * p.curve > p.highest ? 0.0f : p.curve * closed.grad[c];",
        "slope[c] = p.curve * closed.grad[c];",
        (TREE_GRADIENTS,),
    ),
    Breakage(
        "trees, gradients: the mean gradient leaves out the keys of leaves",
        "native/descend_back.h",
        "mean += mean_of(leaf, i, leaf_row.data(), inverse);",
        "mean_of(leaf, i, leaf_row.data(), inverse);",
        (GRADIENTS, TREE_GRADIENTS),
    ),
    Breakage(
        "trees: leaves' means leave out a key",
        "native/forest.h",
        "moments(value, nullptr, count, p.value_dim,",
        "moments(value, nullptr, count - 1, p.value_dim,",
        (ONCE, PREPARED),
    ),
    Breakage(
        "trees: the halves of a small set change places inside a leaf",
        "native/split.h",
        "for (int i = 0; i < half; i++) to[i] = was[at[side][i]];",
        "for (int i = 0; i < half; i++) to[i] = was[at[side][i & ~1]];",
        (ONCE, PREPARED),
    ),
    Breakage(
        "roots of metrics: of four rows one is not taken away",
        "native/products.h",
        "for (int r = 0; r < count; r++) left -= load(row + r * stride + d) * by[r];",
        "for (int r = 1; r < count; r++) left -= load(row + r * stride + d) * by[r];",
        (PREPARED,),
    ),
    Breakage(
        "the middle of many numbers: where a bin is full, that of the next",
        "native/split.h",
        "for (; rank >= many[its]; its++) rank -= many[its];",
        "for (; rank > many[its]; its++) rank -= many[its];",
        (FOUND,),
    ),
    Breakage(
        "trees: metrics count nothing alike in all directions",
        "native/forest.h",
        "to[i] = variance(i, by) + least;",
        "to[i] = variance(i, by);",
        (PREPARED,),
    ),
)
