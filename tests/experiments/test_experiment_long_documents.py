"""The peak memory of tensors is counted right."""

import torch
from experiments.long_documents.peak import PeakMemory

import fewkeys as fk


def test_peak_memory_counts_what_lives_at_once():
    size = 4 * 1000
    with PeakMemory() as one:
        first = torch.ones(1000)
        second = first + 1  # two
        second = second * 2  # three for a moment, then two
        view = first.view(10, 100).T
        view.add_(1)  # no new memory
        del first, view
        third = second.clone()  # two again
    assert one.peak == 3 * size
    assert third.numel() == 1000
    outside = torch.ones(1000)
    with PeakMemory() as two:
        outside.mul_(2)
        kept = outside[:10]
    assert two.peak == 0
    assert kept.numel() == 10


def test_peak_memory_sees_an_n_by_n_tensor_and_none_in_a_plan():
    query, key, value = torch.randn(3, 1, 1, 2048, 16).unbind()
    with PeakMemory() as dense:
        fk.attention(query, key, value, keep=fk.TopK(4), impl="reference")
    with PeakMemory() as linear:
        fk.attention(query, key, value, plan=fk.budget(16).never_exact())
    assert dense.peak >= 4 * 2048**2
    assert linear.peak < 2048**2
