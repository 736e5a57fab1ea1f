"""Plans inside models of transformers. The other rooms take tensors only.

    transformers.apply      makes an answer for each layer: the object that computes its attention calls by a plan
    interface.attach        switches the model's configurations (switch), puts the answers on the modules (answers)
    interface._mask         runs once per call of the model: makes a mask of the real keys (masks)
    interface._attention_forward    runs in each layer: makes `AttentionInputs` (masks, terms), calls its answer
    ByPlan, terms.attend    call `fewkeys.attention` with the layer's plan, or the model's own SDPA where that is faster

`capture` and `spot_check` attach other answers. `cache` puts its streams into `answers.streams`. `effect`, `embed` and
`pipeline` only call the model.
"""
