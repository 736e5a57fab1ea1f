"""The trained long encoder: its weights are the teacher's, and its tasks can be solved in one way only."""

import itertools

import pytest
import torch
from experiments.long_encoder import judge, model, tasks, train

transformers = pytest.importorskip("transformers")


class Tokenizer:
    """Words, numbered as they come."""

    cls_token_id, sep_token_id = 1, 2

    def __init__(self):
        self.words = {}

    def __call__(self, text, **_):
        return {"input_ids": [self.words.setdefault(word, 100_000 + len(self.words)) for word in text.split()]}

    def get_vocab(self):
        return {"tractor": 0, "hill": 1, "##ing": 2, "12345": 3, "of": 4, **{f"word{'ab'[i]}{'cd'[j]}": 5 + 2 * i + j
                for i in (0, 1) for j in (0, 1)}}  # fmt: skip


@pytest.fixture(scope="module")
def bert():
    torch.manual_seed(0)
    shape = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    return transformers.BertModel(transformers.BertConfig(vocab_size=50, **shape)).eval()


def test_the_student_is_the_teacher_but_for_positions(bert):
    """Keys that do not depend on the token leave nothing to rotate towards: then both models are one function."""
    position = bert.embeddings.position_embeddings.weight.data
    position[:] = position[:1]
    for layer in bert.encoder.layer:
        layer.attention.self.key.weight.data.zero_()
        layer.attention.self.key.bias.data.zero_()
    ids = torch.randint(50, (2, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        actual, expected = (one(input_ids=ids).last_hidden_state for one in (model.rotary(bert).eval(), bert))
    torch.testing.assert_close(actual, expected)


def test_all_weights_but_positions_come_from_the_teacher(bert):
    taken = {name: float(weight.double().norm()) for name, weight in model.rotary(bert).state_dict().items()}
    given = {float(weight.double().norm()) for weight in bert.state_dict().values()}
    assert {name for name, norm in taken.items() if norm not in given} == {"embeddings.token_type_embeddings.weight"}


@pytest.mark.parametrize("task", ["pass key", "fact", "passage"])
def test_one_document_answers_each_question(task):
    tokenizer, text = Tokenizer(), torch.arange(100, 4100)
    documents, questions = judge.documents_of(task, text, 300, tokenizer, seed=0)
    assert {len(document) for document in documents} == {298}
    assert len(questions) == judge.ASKED * len(documents)
    assert len({tuple(question.tolist()) for question in questions}) == len(questions)
    for number, question in enumerate(questions):
        own = documents[number // judge.ASKED]
        if task == "passage":  # the document has what surrounds it and no token of its own
            assert not torch.isin(question, own).any()
            assert question[0] == 100 or torch.isin(question[0] - 1, own)
        else:  # the sentence shares the person's name with the question
            names = {token for word, token in tokenizer.words.items() if word[0].isupper()}
            assert names & {*question.tolist()} & {*own.tolist()}


def test_words_of_training_are_not_judged():
    words, judged = tasks.training_words(Tokenizer()), tasks.JUDGING
    things = words.facts[0][2]
    assert things == ("wordac", "wordad", "wordbc", "wordbd")
    assert {part.lower() for name in words.people for part in name.split()} == {*things}
    assert not {statement for statement, *_ in words.facts} & {statement for statement, *_ in judged.facts}


def test_documents_of_a_group_differ_in_what_is_hidden_and_nothing_else():
    rows, generator = {"text": torch.arange(100, 50_000)}, torch.Generator().manual_seed(0)
    words = tasks.training_words(Tokenizer())
    batch = train.batch_of(rows, 2048, Tokenizer(), words, generator)
    groups, many = train.LENGTHS[2048]
    documents, mask = batch.documents
    assert documents.shape == (groups * many, 2048)
    assert mask.all()
    assert batch.chunks[0].shape == (groups * many // 2 * 8, train.CHUNK + 2)
    shared = []
    for first, second in itertools.pairwise(documents):
        shared.append(float(torch.isin(first[first < 100_000], second).float().mean()))
    assert [share > 0.98 for share in shared] == [place % many > 0 for place in range(1, groups * many)]
    right = torch.arange(groups * many) == batch.answers[:, None]
    assert not (batch.wrong & right).any()
    for asked, wrong in zip(batch.words, batch.wrong, strict=True):
        # A group shares its passages, so its other documents are no wrong answers.
        assert int(wrong.sum()) == ((groups - 1) * many if asked is None else groups * many - 1)
    asked = [word for word in batch.words if word]
    assert len(set(asked)) == len(asked)
    for chosen, span in zip(batch.chosen, batch.asking[0][len(batch.words) :], strict=True):
        assert torch.isin(span[1 : 1 + tasks.PASSAGE], batch.chunks[0][chosen]).all()


def test_documents_grow_and_each_step_is_drawn_anew():
    rows = {"text": torch.arange(100, 50_000)}
    steps = train.Steps("long", 60, rows, Tokenizer(), tasks.training_words(Tokenizer()), seed=3)
    lengths = [steps[step].documents[0].shape[1] for step in range(60)]
    assert {*lengths[:4]} == {256}
    assert {*lengths[24:]} >= {2048, 4096, 8192}
    assert torch.equal(steps[5].documents[0], steps[5].documents[0])
    assert not torch.equal(steps[5].documents[0], steps[6].documents[0])


def test_ranks_count_what_is_better():
    vectors = torch.eye(3)
    questions = torch.tensor([[1.0, 0.5, 0.0], [1.0, 0.5, 0.0], [1.0, 0.5, 0.0]])
    assert judge.ranks(questions, vectors, torch.tensor([0, 1, 2])).tolist() == [0, 1, 2]
    found = torch.tensor([[1.0, 1.0], [1.0, 0.0]]).double()
    assert judge.interval(found, found) == [1.0, 1.0]
    low, high = judge.interval(found * torch.tensor([1.0, 0.0]), found)
    assert low < 2 / 3 < high
