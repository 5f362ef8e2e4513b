"""Incremental detokenizers: token ids in, text out, identical to `Tokenizer.decode` of the whole sequence."""
