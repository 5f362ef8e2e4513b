"""From logits to tokens.

Greedy takes the highest logit, the lowest id among equals. Sampling filters, renormalises and inverts the cumulative
distribution in the order of ids at the uniform number of (seed, batch_index, sequence_index, position).

The steps come in the order of transformers, our oracle: embedding bias, repetition penalty, presence and frequency
penalty, bans (repeated n-grams, bad words, early end ids), then temperature, top_k, top_p and min_p.

The choice is a pure function of a row of logits, the item's config, the sequence's tokens and (seed, batch_index,
sequence_index, position). All memory is recomputed from the tokens, so a sequence continues bit for bit after
preemption or on another worker. The logits themselves are less exact: kernels may round their last bits differently for
another shape of the batch, so a token may differ where two logits agree to about 1e-6, or where the uniform number is
as close to a border between two tokens. Such ties are common with half-precision weights. From the temperature on,
float64 keeps further rounding out.
"""
