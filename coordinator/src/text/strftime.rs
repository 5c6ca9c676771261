//! `strftime_now` for templates that print the date. UTC, so that a prompt does not depend on the server's time zone.

use std::fmt::Write as _;
use std::time::{SystemTime, UNIX_EPOCH};

const MONTHS: [&str; 12] =
    ["January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November", "December"];
const DAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];

/// The present moment under a C `strftime` format.
pub fn now(format: &str) -> String {
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
    at(seconds, format)
}

/// Seconds since the epoch under a C `strftime` format; unknown conversions are kept as they stand.
fn at(seconds: u64, format: &str) -> String {
    let (days, of_day) = (seconds / 86_400, seconds % 86_400);
    let (hour, minute, second) = (of_day / 3600, of_day / 60 % 60, of_day % 60);
    let (year, month, day) = civil(days);
    let hour12 = if hour % 12 == 0 { 12 } else { hour % 12 };
    let (month_name, day_name) = (MONTHS[month as usize - 1], DAYS[((days + 4) % 7) as usize]);
    let day_of_year = days - days_before(year, 1) + 1;
    let mut out = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        let mut code = chars.next();
        // `%-d`: no padding.
        let bare = code == Some('-');
        if bare {
            code = chars.next();
        }
        let width = |w: usize| if bare { 0 } else { w };
        let _ = match code {
            Some('Y') => write!(out, "{year}"),
            Some('y') => write!(out, "{:0w$}", year % 100, w = width(2)),
            Some('m') => write!(out, "{month:0w$}", w = width(2)),
            Some('d') => write!(out, "{day:0w$}", w = width(2)),
            Some('e') => write!(out, "{day:w$}", w = width(2)),
            Some('j') => write!(out, "{day_of_year:0w$}", w = width(3)),
            Some('H') => write!(out, "{hour:0w$}", w = width(2)),
            Some('I') => write!(out, "{hour12:0w$}", w = width(2)),
            Some('M') => write!(out, "{minute:0w$}", w = width(2)),
            Some('S') => write!(out, "{second:0w$}", w = width(2)),
            Some('p') => write!(out, "{}", if hour < 12 { "AM" } else { "PM" }),
            Some('B') => write!(out, "{month_name}"),
            Some('b' | 'h') => write!(out, "{}", &month_name[..3]),
            Some('A') => write!(out, "{day_name}"),
            Some('a') => write!(out, "{}", &day_name[..3]),
            Some('F') => write!(out, "{year}-{month:02}-{day:02}"),
            Some('T') => write!(out, "{hour:02}:{minute:02}:{second:02}"),
            Some('Z') => write!(out, "UTC"),
            Some('z') => write!(out, "+0000"),
            Some('%') => write!(out, "%"),
            Some(other) => write!(out, "%{other}"),
            None => write!(out, "%"),
        };
    }
    out
}

fn is_leap(year: u64) -> bool {
    year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400))
}

fn month_length(year: u64, month: u64) -> u64 {
    match month {
        2 => 28 + u64::from(is_leap(year)),
        4 | 6 | 9 | 11 => 30,
        _ => 31,
    }
}

/// Days from the epoch to the first of a month.
fn days_before(year: u64, month: u64) -> u64 {
    let years: u64 = (1970..year).map(|y| 365 + u64::from(is_leap(y))).sum();
    years + (1..month).map(|m| month_length(year, m)).sum::<u64>()
}

/// Year, month (1-12) and day (1-31) of a day number.
fn civil(days: u64) -> (u64, u64, u64) {
    let mut year = 1970;
    let mut left = days;
    while left >= 365 + u64::from(is_leap(year)) {
        left -= 365 + u64::from(is_leap(year));
        year += 1;
    }
    let mut month = 1;
    while left >= month_length(year, month) {
        left -= month_length(year, month);
        month += 1;
    }
    (year, month, left + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_right() {
        assert_eq!(at(0, "%A %Y-%m-%d %H:%M:%S %j"), "Thursday 1970-01-01 00:00:00 001");
        assert_eq!(at(951_782_400, "%d %B %Y, %a, %-d/%-m, %y"), "29 February 2000, Tue, 29/2, 00");
        assert_eq!(at(1_709_251_199, "%F %T %I%p %j %Z %%"), "2024-02-29 23:59:59 11PM 060 UTC %");
        assert_eq!(at(4_102_444_800, "%b %e %q"), "Jan  1 %q");
        assert_eq!(now("%%"), "%");
    }
}
