// Compute the angles of the rotation at the new positions, which a step needs before its layers.
#include "step/common.cuh"

// rates float64[pairs], magnitude: see runtime/layers/rope.py; positions int32[rows]; angles float32[rows, pairs, 2], cosine and sine.
// Angles are formed in float64, as positions get large. grid rows, any number of threads.
extern "C" __global__ void step_angles(const double* __restrict__ rates, double magnitude, const int* __restrict__ positions, int pairs,
                                       float2* __restrict__ angles) {
    start_dependents();
    wait_for_inputs();
    const int row = blockIdx.x;
    for (int j = threadIdx.x; j < pairs; j += blockDim.x) {
        double sine, cosine;
        sincos((double)positions[row] * rates[j], &sine, &cosine);
        angles[row * pairs + j] = make_float2((float)(cosine * magnitude), (float)(sine * magnitude));
    }
}
