//! Sizes as people read and write them.

const GIB: f64 = 1024.0 * 1024.0 * 1024.0;

/// GiB with as many decimals as a small model needs.
pub fn gib(bytes: u64) -> String {
    let value = bytes as f64 / GIB;
    if value < 1.0 { format!("{value:.3}") } else { format!("{value:.1}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gib_has_useful_digits() {
        assert_eq!(gib(17 << 20), "0.017");
        assert_eq!(gib(163 * (1 << 30) + (1 << 29)), "163.5");
    }
}
