"""From logits to tokens.

Greedy takes the highest logit, the lowest id among equals. Sampling filters, and takes the largest sum of logit /
temperature and a noise that is hashed from (seed, batch_index, sequence_index, position, token).

The steps come in the order of transformers, our oracle: embedding bias, repetition penalty, presence and frequency
penalty, bans (repeated n-grams, bad words, early end ids), the grammar of a guided item, then temperature, top_k, top_p
and min_p.

The choice is a pure function of a row of logits, the item's config, the sequence's tokens and (seed, batch_index,
sequence_index, position). All memory is recomputed from the tokens, so a sequence continues with the same draws after
preemption or on another worker. The logits are less exact: the last bits of a product may depend on the shape of the
batch. Then a token differs where two logits, or two sums, agree to about 1e-6: rarely in float32, often in half
precision. The setting `batch_invariant` removes this. From the temperature on, float64 keeps further rounding out.
"""
