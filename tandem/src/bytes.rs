//! Sizes as people read and write them.

use tandem_model::budget::Gib;

/// GiB with as many decimals as a small model needs.
pub fn gib(bytes: u64) -> String {
    Gib(bytes).to_string()
}

/// Units of [`amount`], for messages.
pub const UNITS: &str = "KiB, MiB, GiB, TiB, KB, MB, GB, TB";

/// A number with a unit of bytes behind it, in any case: `4GiB`, `512m`, `1.5TB`; without a unit, bytes. `None` for anything else, and for
/// more than 8 PiB: beyond 2^53 no number here is exact.
pub fn amount(text: &str) -> Option<f64> {
    let split = text.find(|c: char| !(c.is_ascii_digit() || c == '.')).unwrap_or(text.len());
    let (number, unit) = text.split_at(split);
    let factor = match unit.to_ascii_lowercase().as_str() {
        "" | "b" => 1.0,
        "kib" | "k" => 2f64.powi(10),
        "mib" | "m" => 2f64.powi(20),
        "gib" | "g" => 2f64.powi(30),
        "tib" | "t" => 2f64.powi(40),
        "kb" => 1e3,
        "mb" => 1e6,
        "gb" => 1e9,
        "tb" => 1e12,
        _ => return None,
    };
    let value = number.parse::<f64>().ok()? * factor;
    (value <= 2f64.powi(53)).then_some(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gib_has_useful_digits() {
        assert_eq!(gib(17 << 20), "0.017");
        assert_eq!(gib(163 * (1 << 30) + (1 << 29)), "163.5");
        assert_eq!(gib(u64::MAX), "over 2^34");
    }

    #[test]
    fn amounts_have_units_or_none() {
        for (text, bytes) in
            [("0", 0.0), ("17", 17.0), ("2TiB", 2f64.powi(41)), ("1.5g", 1.5 * 2f64.powi(30)), ("1tb", 1e12), ("3KiB", 3072.0)]
        {
            assert_eq!(amount(text), Some(bytes), "{text}");
        }
        for text in ["", "GiB", "-1", "2 GiB", "1e3", "1.2.3", "nanGiB", "infGiB", "9000TiB", "2PiB"] {
            assert_eq!(amount(text), None, "{text}");
        }
    }
}
