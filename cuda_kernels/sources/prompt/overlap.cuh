// How launches of a prompt overlap.
#pragma once

// The first thing a kernel does that is launched as a dependent: lets the next launch start as soon as all blocks of this one run, so that its blocks are there
// when this one ends, and waits until the one before has ended. With that all launches before have ended, too, as each of them waits or is none of these.
// Without the launch attribute, and before sm_90, both do nothing.
__device__ __forceinline__ void follow_launch_before() {
#if !defined(ON_HOST) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
