//! The API over real sockets, with a scripted engine behind it. T-numbers are the fault reports these tests guard against.

mod answers;
mod harness;
mod hostile;
mod lifecycle;
mod refusals;
mod stats;
mod streams;
