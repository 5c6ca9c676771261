//! [`tandem_fuzz::route_table`] for libFuzzer.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    tandem_fuzz::route_table(data);
});
