"""From logits to tokens.

Greedy takes the highest logit, the lowest id among equals. Sampling filters, renormalises and inverts the cumulative
distribution in the order of ids at the uniform number of (seed, batch_index, sequence_index, position).

The order is that of transformers, so that its arguments are oracles: embedding bias, repetition penalty, presence and
frequency penalty, bans (repeated n-grams, bad words, early end ids), then temperature, top_k, top_p and min_p.

What is guaranteed: the choice is a pure function of a row of logits, the item's config, the sequence's tokens and
(seed, batch_index, sequence_index, position). Whatever it must remember is recomputed from the tokens, so a sequence
goes on bit for bit after preemption or elsewhere. What is not: kernels may round the last bits of the logits
differently for another shape of the batch, so a token may differ where two logits are equal to about 1e-6, or where
the uniform number lies that close to a border between two tokens. Everything from the temperature on is computed in
float64 so that nothing is added to that. With half-precision weights such ties are common.
"""
