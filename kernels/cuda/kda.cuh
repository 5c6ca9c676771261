// Sizes of the KDA mixer and its decay. Neighbours: kda.cu (row by row), kda_chunk.cu (16 rows at once), cuda/mixers.rs.
#pragma once
#include "step.cuh"

struct Kda {
    int heads, dim, taps;
    float bound; // lower bound of the log decay; NaN: the softplus form
    float eps;
};

// `decay`: e^a_log of the head; z: the projected decay with its bias.
DEVICE float log_decay(const Kda& p, float decay, float z) { return is_nan(p.bound) ? -decay * softplus(z) : p.bound * sigmoid(decay * z); }
