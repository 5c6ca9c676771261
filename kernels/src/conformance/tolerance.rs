//! How far an op may be from the f64 oracle, and why.
//!
//! An error is judged against a *scale*: the largest value of the row (for a matrix product: Σ|x·w| of the element), so that a tolerance
//! is a number of roundings, not of units. In bf16 precision an op may err more by what the prescribed roundings cost: the oracle is
//! run once more with them, and [`BF16_MARGIN`] times its largest error is allowed on top.

/// A named bound on |got − oracle| / scale in f32 arithmetic.
#[derive(Clone, Copy, Debug)]
pub struct Tolerance {
    /// Name, for messages.
    pub name: &'static str,
    /// The bound.
    pub relative: f64,
}

macro_rules! tolerances {
    ($($(#[$doc:meta])* $name:ident = $relative:expr;)*) => {
        $($(#[$doc])* pub const $name: Tolerance = Tolerance { name: stringify!($name), relative: $relative };)*
    };
}

tolerances! {
    /// Copies and single roundings to f32.
    EXACT_TOL = 1.2e-7;
    /// A product of up to ~600 columns, against Σ|x·w|: the sum's order is free, and rounding grows with √columns (6e-8 · 25 = 1.5e-6).
    GEMV_TOL = 2e-6;
    /// A norm is one sum of squares and one rounding per factor.
    NORM_TOL = 1e-6;
    /// mHC gates: a product of N·D columns goes through exp, and 20 Sinkhorn passes contract what it left.
    MHC_TOL = 5e-6;
    /// Two products with SwiGLU between them, judged by the row's largest value; the second may cancel (plain f32: up to 8e-6).
    MLP_TOL = 2e-5;
    /// KDA: over a hundred decays and rank-1 updates of one state, then a norm that scales small outputs up (plain f32: up to 7e-6); a
    /// chunk that factors e^(G_i − G_j) at −5 a token rounds exponents of up to 80.
    KDA_TOL = 5e-5;
    /// Attention over a few hundred rows: exp of a product, a weighted sum, a product.
    ATTEND_TOL = 2e-5;
    /// Router weights: sigmoid of a product, over a sum of them.
    ROUTER_TOL = 1e-5;
    /// Log-probabilities, in absolute terms: the error of a logit plus that of a sum of exponentials.
    LOGPROB_TOL = 2e-5;
    /// Scores nearer than this (relative to the largest) may be ranked either way; exact ties may not.
    SCORE_TIE_TOL = 2e-5;
}

/// Where a backend rounds to bf16 is prescribed up to a few extra roundings (q of an absorbed product, a weighted latent).
pub const BF16_MARGIN: f64 = 4.0;
