"""Plans by layer, plans that know their model, and questions about a context."""

import json
import warnings

import pytest
import torch

pytest.importorskip("transformers")

import fewkeys as fk
from chats import chat_tokenizer
from fewkeys.captures import Capture
from fewkeys.integrations.transformers import check_same_weights
from tiny_models import bert, gpt2, llama, run, tokens


def test_plans_by_layer():
    """A dictionary of layers is a value that JSON keeps; one plan of a layer is that of all its heads."""
    one, other = fk.Plan(fk.Window(3)), fk.Plan(fk.Sinks(2))
    plans = {2: one, 0: other, 1: [one, other]}
    actual = fk.ModelPlan.from_dict(json.loads(json.dumps(fk.ModelPlan.of(plans).to_dict())))
    assert actual.layers == ((other,), (one, other), (one,))
    model = llama()
    with fk.apply(model, plans):
        want = run(model, input_ids=tokens())
    with fk.apply(model, actual):
        assert torch.equal(run(model, input_ids=tokens()), want)
    with pytest.raises(ValueError, match=r"^plans: expected every layer from 0 on, got \[0, 2\]"):
        fk.ModelPlan.of({0: one, 2: one})


def test_a_plan_knows_its_model():
    model = bert()
    capture = fk.capture(model, [tokens()])
    plan = fk.ModelPlan.of(dict.fromkeys(range(3), fk.Plan(fk.Window(3))))
    tuned = fk.ModelPlan(plan.layers, {"model": "owner/model", "weights": list(capture.weights)})
    assert Capture.load(capture.directory).weights == capture.weights
    assert len(capture.weights) == 3
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for same in (model, bert().bfloat16()):
            fk.apply(same, tuned).restore()
        fk.apply(gpt2(), plan).restore()
        check_same_weights(tuned, [])  # whose weights are no plain numbers
    with torch.no_grad():
        model.encoder.layer[1].attention.self.query.weight.mul_(1.1)
    with pytest.warns(UserWarning, match=r"^plan: tuned on owner/model, and this model's attention has other weights"):
        fk.apply(model, tuned).restore()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fk.apply(model, tuned).restore()
    assert [warning.filename for warning in caught] == [__file__]


class Letters:
    """A tokenizer of letters."""

    chat_template = None

    def __call__(self, text, add_special_tokens, return_tensors):
        return {"input_ids": torch.tensor([[1] * add_special_tokens + [3 + ord(letter) % 50 for letter in text]])}

    def decode(self, ids, skip_special_tokens):
        return " ".join(str(int(token)) for token in ids)

    def apply_chat_template(self, said, add_generation_prompt, tokenize):
        return f"<user>{said[0]['content']}</user><bot>"


@pytest.mark.parametrize("chats", [False, True])
def test_questions_about_a_context(chats):
    """Each is answered as if it were the only one, from a cache that keeps all as by the model itself."""
    model, letters = llama(), Letters()
    model.generation_config.use_cache = False  # as some models have it
    letters.chat_template = "there is one" if chats else None
    every = fk.Plan(fk.select.RecentBlocks(64, 4), fk.rest.RunningMeans(1))
    ask = fk.pipeline(model, letters, every)
    how = {"max_new_tokens": 4, "pad_token_id": 0, "eos_token_id": None}
    actual = ask("a context of some words. ", questions=["who?", "when then?"], answer_prefix="It", **how)["answers"]
    text = "<user>a context of some words. \n\n{}</user><bot>It" if chats else "a context of some words. \n\n{}\nIt"
    for question, answer in zip(["who?", "when then?"], actual, strict=True):
        ids = letters(text.format(question), not chats, "pt")["input_ids"]
        assert answer == letters.decode(model.generate(ids, do_sample=False, **how)[0, ids.shape[1] :], True)
        assert ask("a context of some words. ", question=question, answer_prefix="It", **how) == {"answer": answer}
    assert (
        ask("a context of some words. ", questions=iter(["who?"]), answer_prefix="It", **how)["answers"] == actual[:1]
    )
    assert model.config._attn_implementation != "fewkeys"
    with pytest.raises(ValueError, match=r"^question, questions: expected one of the two"):
        ask("a context")
    with pytest.raises(ValueError, match=r"^model: expected one that generates text, got BertModel"):
        fk.pipeline(bert(), letters, every)


ROUND = "{% for message in messages %}<u>{{ message.content }}</u>{% endfor %}"
PARTS = "{% for m in messages %}<u>{% for part in m.content %}{{ part.text }}{% endfor %}</u>{% endfor %}"


@pytest.mark.parametrize("template", [ROUND, PARTS])
@pytest.mark.parametrize("context", ["The list", "\0 The list\0 of names"])
def test_a_prompt_is_the_context_and_the_question_in_the_template(template, context, monkeypatch):
    """Also if the context has the character that marks the place of the question."""
    letters, read = chat_tokenizer(), []
    monkeypatch.setattr(letters, "chat_template", template)
    ask = fk.pipeline(llama(), letters, fk.budget(16, is_causal=True))
    monkeypatch.setattr(type(ask), "_ids", lambda ask, text, first: read.append(text) or torch.ones(1, 3).long())
    ask(context, question="who?", max_new_tokens=1, pad_token_id=0)
    assert "".join(read) == f"<u>{context}\n\nwho?</u>"


def test_a_template_without_the_message_is_refused(monkeypatch):
    monkeypatch.setattr(chat_tokenizer(), "chat_template", "{% for message in messages %}<u></u>{% endfor %}")
    ask = fk.pipeline(llama(), chat_tokenizer(), fk.budget(16, is_causal=True))
    with pytest.raises(ValueError, match=r"^tokenizer: expected a chat template that puts the user's message into"):
        ask("a context", question="who?")


@pytest.mark.parametrize("template", [None, ROUND])
def test_what_is_no_text_is_refused(template, monkeypatch):
    """Not read as the list's own description."""
    monkeypatch.setattr(chat_tokenizer(), "chat_template", template)
    ask = fk.pipeline(llama(), chat_tokenizer(), fk.budget(16, is_causal=True))
    for context, asked in [(["one", "two"], {"question": "who?"}), (3, {"questions": ["who?"]})]:
        with pytest.raises(TypeError, match=r"^context, question, questions: expected texts"):
            ask(context, **asked)
    for asked in ({"question": ["who?", "when?"]}, {"questions": ["who?", None]}):
        with pytest.raises(TypeError, match=r"^context, question, questions: expected texts"):
            ask("a context", **asked)


def test_a_question_has_one_answer():
    """Options of the call that ask for more are refused, and those of the model's own configuration are not asked."""
    model, how = llama(), {"question": "who?", "max_new_tokens": 2, "pad_token_id": 0}
    ask = fk.pipeline(model, Letters(), fk.budget(16, is_causal=True))
    for name in ("num_beams", "num_return_sequences", "return_dict_in_generate", "past_key_values", "attention_mask"):
        with pytest.raises(TypeError, match=f"multiple values for keyword argument '{name}'"):
            ask("a context", **how, **{name: 2})
    answer = ask("a context", **how)
    model.generation_config.num_beams, model.generation_config.return_dict_in_generate = 2, True
    assert ask("a context", **how) == answer


def test_a_pipeline_stops_at_strings_by_its_own_tokenizer(monkeypatch):
    model, letters, passed = llama(), Letters(), {}

    def generate(ids, **how):
        passed.update(how)
        return ids

    monkeypatch.setattr(model, "generate", generate)
    fk.pipeline(model, letters, fk.budget(16, is_causal=True))("a context", question="who?", stop_strings=["."])
    assert passed["tokenizer"] is letters
    assert passed["stop_strings"] == ["."]


def test_generation_under_a_plan_takes_a_tokenizer_for_its_stop_strings():
    """transformers hands `tokenizer` on to the attention of every layer."""
    model = llama()
    how = {"max_new_tokens": 3, "stop_strings": ["It is so."], "tokenizer": chat_tokenizer(), "do_sample": False}
    ids = tokens(1, 9)
    exact = model.generate(ids, **how, pad_token_id=0)
    with fk.apply(model, fk.Plan()):
        assert torch.equal(model.generate(ids, **how, pad_token_id=0), exact)
    with pytest.raises(TypeError, match=r"^context, question, questions: expected .* questions as a list"):
        fk.pipeline(model, Letters(), fk.budget(16, is_causal=True))("a context", questions="who?")
