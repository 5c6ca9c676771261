//! Template, tokenizer, detokenizer and stop strings.
