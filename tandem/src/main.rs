//! Tandem.
fn main() {}
