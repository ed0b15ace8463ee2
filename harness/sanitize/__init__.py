"""compute-sanitizer over the C++ submissions, by a driver without torch, whose kernels it would instrument too."""
