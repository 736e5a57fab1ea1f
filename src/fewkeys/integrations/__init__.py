"""Everything that knows a model. The rest of the package takes tensors only.

    transformers.apply      a plan for each layer -> an answer of its attention calls
    interface.attach        switches the model's configurations (switch), puts the answer on the modules (answers)
    interface._mask         at the start of each call: a mask of the real keys (masks)
    interface._attention_forward    in each layer: who answers (answers), the call as `AttentionInputs` (masks, terms)
    ByPlan, terms.attend    the layer's plan -> `fewkeys.attention`, or the model's own SDPA where that is faster

`capture`, `spot_check` and `effect` run the model by answers of their own; `cache` leaves its keys in `answers`, too.
`embed` and `pipeline` only call the model.
"""
