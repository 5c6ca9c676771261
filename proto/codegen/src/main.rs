//! Generates code.
fn main() {}
