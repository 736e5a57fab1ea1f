"""Which tests hold which rooms, and changes that cannot be noticed."""

from typing import NamedTuple


class Room(NamedTuple):
    """Files of the package, and tests: at most `most` cases of every function.

    By a file's stem, `words`: of which the name of a case of `tests/cases.py` must have one; `more`: tests of its own.
    """

    files: tuple[str, ...]
    tests: tuple[str, ...]
    words: dict[str, tuple[str, ...]] = {}  # noqa: RUF012
    more: dict[str, tuple[str, ...]] = {}  # noqa: RUF012
    most: int = 6


def law(number, *functions):
    files = {
        1: "01_full_budget_is_exact",
        2: "02_impls_agree",
        3: "03_masked_is_deleted",
        4: "04_causal_means_causal",
        5: "05_invariance",
        6: "06_same_seed_same_result",
        7: "07_no_double_counting",
        9: "09_linear_cost",
        11: "11_refusals",
        "gradients": "02_gradients",
    }
    file = f"laws/test_law_{files[number]}.py"
    return tuple(f"{file}::test_{name}" for name in functions) or (file,)


TABLED = ("test_selectors", "test_streams", "test_defaults")
"""Files beside the laws whose cases bear the names of `tests/cases.py`."""
QUALITY = "judging/test_quality.py::test_budgets_are_kept"
PREDICTED = ("parts/test_sparsefinder_graphs.py",)
LAWS = (
    *law(1, "full_budget", "every_executor_is_exact_on_a_full_budget", "no_plan_is_the_definition"),
    *law(2, "forward", "causal", "gradients", "causal_gradients"),
    *law(3, "bidirectional", "causal", "causal_left_padding", "left_padding_by_key_mask"),
    *law(4),
    *law(5),
    *law(7),
)
NEWEST = {
    "sets": ("kernels/test_native_building.py",),
    "build": (
        *("kernels/test_native_building.py", "kernels/test_native_failures.py"),
        *law(9, "compiled_kernels_are_linear"),
    ),
    "crossover": ("parts/test_crossover.py",),
    "kept": ("parts/test_crossover.py",),
    "door": ("integrations/test_contexts.py", "integrations/test_transformers.py"),
    "terms": ("integrations/test_terms.py", "integrations/test_windows.py", "integrations/test_biases.py"),
    "gaps": (
        *("integrations/test_cache.py", "parts/test_tree_streams.py"),
        "parts/test_distance_bias.py::test_refusals",
    ),
    "padded": (
        *("integrations/test_cache.py", "parts/test_tree_streams.py", "parts/test_loaders.py"),
        "parts/test_streams.py::test_padding_anywhere_is_as_if_it_never_came",
    ),
}
"""What holds the youngest files."""
STATISTICS = (
    *("parts/test_stand_ins.py", "parts/test_odd_inputs.py", "parts/test_cohorts.py", "kernels/test_native.py"),
    "parts/test_few_queries.py",
    *("parts/test_selectors.py", *law(2, "forward"), *law(3, "bidirectional"), *law(5)),
)
STORED = ("integrations/test_capture.py", "integrations/test_sensitivity.py", "parts/test_loaders.py")
TUNED = ("judging/test_tune.py", "integrations/test_sensitivity.py", "judging/test_model_plan.py")
"""What holds files that survey keys and queries, store them, and choose plans by them."""
ROOMS = {
    "graph": Room(
        ("core/graph.py", "core/groups.py"),
        ("parts/test_selectors.py", "parts/test_groups.py", "parts/test_cohorts.py", *LAWS, *law(11)),
        {"groups": ("group", "routing", "block", "buckets", "hash", "fixed", "reformer", "longformer")},
    ),
    "weights": Room(
        ("core/weights.py", "core/entmax.py", "core/totals.py"),
        (
            "parts/test_weights.py",
            "parts/test_exact.py",
            "parts/test_odd_inputs.py::test_second_derivatives_of_entmax",
            *law(1, "no_plan_is_the_definition", "entmax_is_the_definition", "full_budget"),
            *law(2, "forward", "gradients"),
            *law(7, "weights_sum_to_one"),
            *law("gradients", "gradcheck_with_the_selection_held_fixed"),
            *law(11),
        ),
    ),
    "select": Room(
        ("select/*.py",),
        ("parts/test_selectors.py", *law(11), *LAWS, "parts/test_cohorts.py"),
        {
            "recent": ("recent",),
            "window": ("window", "sinks"),
            "leverage": ("leverage", "universal"),
            "outliers": ("outliers", "cohorts"),
            "top_k": ("top-k", "best"),
            "causal": ("leverage", "norm", "random"),
            "controls": ("norm", "random"),
            "block_clusters": ("block clusters",),
            "key_tree": ("key tree",),
            "global_tokens": ("global",),
        },
        {
            **dict.fromkeys(("groupings", "predicted", "projection", "rows"), PREDICTED),
            "memberships": (*PREDICTED, "parts/test_baselines.py::test_routing"),
            "block_clusters": tuple(
                f"parts/test_baselines.py::test_{one}"
                for one in ("block_clusters", "sequences_stand_alone", "refusals")
            ),
            "key_tree": ("parts/test_trees.py",),
        },
    ),
    "rest": Room(
        ("rest/*.py",),
        ("parts/test_stand_ins.py", "parts/test_bounded.py", "parts/test_cohorts.py", QUALITY, *law(11), *LAWS),
        {
            "cluster_means": ("means", "cohort"),
            "cohort_means": ("cohort",),
            "group_means": ("group means",),
            "moments": ("moments",),
            "running_means": ("running",),
            "tree_means": ("tree",),
            "uniform_sample": ("sample",),
        },
        {
            "cohort_means": law(2, "what_kernels_prepare_is_what_torch_prepares"),
            "running_means": ("parts/test_running_means.py",),
        },
    ),
    "execute": Room(
        ("execute/*.py", "execute/torch/*.py", "execute/native/*.py"),
        (
            *LAWS,
            *law(2, "executors_agree_on_the_same_problem", "their_gradients_agree", "their_causal_gradients_agree"),
            "parts/test_exact.py",
            "parts/test_groups.py",
            "parts/test_cohorts.py",
        ),
        {
            "grouped": ("group", "block", "buckets", "routing", "fixed"),
            "by_cohort": ("cohort",),
            "by_nodes": ("tree", "running"),
            "by_descent": ("tree",),
            "descent": ("tree",),
        },
        {
            "backward": ("kernels/test_native_gradients.py",),
            **dict.fromkeys(("by_descent", "descent", "by_nodes"), ("kernels/test_native_tree.py",)),
        },
    ),
    "past": Room(
        ("past/*.py",),
        (
            "parts/test_running_means.py",
            "parts/test_streams.py",
            "kernels/test_native_past.py",
            "kernels/test_native_gradients.py",
            *law(2, "causal", "causal_gradients"),
            *law(4, "future_tokens_do_not_matter"),
            *law(7, "the_past_counts_every_key_once", "weights_sum_to_one_causal"),
        ),
    ),
    "newest": Room(
        (
            *("native/sets.py", "native/build.py", "cost/crossover.py", "cost/kept.py"),
            *("integrations/door.py", "integrations/terms.py", "core/gaps.py", "streaming/padded.py"),
        ),
        (),
        more=NEWEST,
    ),
    "measured": Room(
        ("sketch/clusters.py", "sketch/gram.py", "native/keys.py", "captures/*.py", "tuning/*.py"),
        (),
        more={
            **dict.fromkeys(("clusters", "gram", "keys"), STATISTICS),
            **dict.fromkeys(("capture", "writer"), STORED),
            **dict.fromkeys(("tune", "allocate", "candidates", "score"), TUNED),
        },
    ),
}
EQUIVALENT = {
    "core/graph.py band_block": "how many queries share a tile of a band: time alone",
    "core/graph.py Graph._counts: 2": "how many queries are counted at once: memory alone",
    "core/entmax.py _newton: float(step.abs().max()) <= close": "a step that is as small as rounding, or one more",
    "core/entmax.py largest: 0.0 -> 1.0": "what a row without entries is shifted by: all of it stays hidden",
    "core/weights.py Softmax.kernel: any((part.requires_grad": "whether scores are written over: memory alone",
    "core/weights.py Softmax.kernel: 0.0 -> 1.0": "what a row of which nothing is seen is shifted by: it stays hidden",
    "core/weights.py Softmax.split_kernel: any((part.requires_grad": "whether scores are written over: memory alone",
    "past/native.py Steps.unsupported: 0 -> 1": "which of two tensors of one dtype and device an error describes",
    "past/gradient.py _Scanned.forward: 1 -> 2": "an excess that claims a gradient, which nothing passes on",
    "execute/exact.py attend: x.keys - 1 ->": "a mask that hides nothing, or none: time alone",
    "execute/torch/by_block.py attend: graph.columns.blocks > 1": "one list by blocks, or at once: time alone",
    "past/tokens.py Tokens.empty: torch.zeros": "numbers of a tensor that has none",
    "sketch/gram.py whitener: info == 0": "Cholesky or eigenvalues, of which W W^T is the same: time alone",
    "sketch/clusters.py pieces": "which pieces are looked at together: memory and time alone",
    "cost/crossover.py exact_is_faster: own > SHIPPED": "a plan of exactly as many operations: either may run",
    "core/graph.py _join_columns: a.blocks > b.blocks": "lists of equal blocks are refined into themselves",
}
"""Why a change changes nothing that could be asked for: by the beginning of its line."""
