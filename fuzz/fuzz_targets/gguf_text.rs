//! [`tandem_fuzz::gguf_text`] for libFuzzer.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    tandem_fuzz::gguf_text(data);
});
