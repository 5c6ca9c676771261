//! The API over real sockets, with a scripted engine behind it. T-numbers are the fault reports these tests guard against.

mod access;
mod answers;
mod faces;
mod harness;
mod hostile;
mod lifecycle;
mod refusals;
mod stats;
mod streams;
mod tools;
