//! The API over real sockets, with a scripted engine behind it. T-numbers are the fault reports these tests guard against.

mod answers;
mod harness;
mod lifecycle;
mod refusals;
mod streams;
