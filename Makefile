# weft: make help lists the targets.
#
# Two builds come from one source tree: with nvcc the programs contain the GPU code, without it they run on the CPU.
# Settings, on the command line or in the environment:
#   NVCC=...              the CUDA compiler; NVCC= builds for the CPU alone
#   GPU_ARCH="80 90a 120" GPU architectures; default: that of the GPU found, else "80 90a 120"
#   CPU_FLAGS=...         host instruction set; default -march=native (the binary is for this machine)
#   MODE=release|asan|tsan   build/<mode> holds the result
#   PREFIX=, DESTDIR=     where make install puts things

MODE      ?= release
CXX       ?= g++
CPU_FLAGS ?= -march=native
PREFIX    ?= /usr/local
PYTHON    ?= python3

NVCC ?= $(firstword $(shell command -v nvcc 2>/dev/null) $(wildcard /usr/local/cuda/bin/nvcc))
FOUND_ARCH := $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | tr -d '. ' | sort -u | sed 's/^90$$/90a/' | tr '\n' ' ')
GPU_ARCH ?= $(if $(strip $(FOUND_ARCH)),$(strip $(FOUND_ARCH)),80 90a 120)

B := build/$(MODE)

# ---- host code -------------------------------------------------------------------------------------------------------
MODE_FLAGS_release := -O3
MODE_FLAGS_asan    := -O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer
MODE_FLAGS_tsan    := -O1 -g -fsanitize=thread
# No fast-math on host code: with it isfinite() lies. OpenBLAS's OpenMP flavour shares the thread pool with our loops.
CXXFLAGS += -std=c++20 $(MODE_FLAGS_$(MODE)) $(CPU_FLAGS) -fopenmp -Wall -Wextra -Werror -I. -MMD -MP
LDLIBS   += -lopenblas -lxxhash -lpcre2-8 -lutf8proc
LDFLAGS  += $(filter -fsanitize%,$(MODE_FLAGS_$(MODE))) -fopenmp

HOST_SRC := $(wildcard llmc/base/*.cpp llmc/file/*.cpp llmc/text/*.cpp llmc/model/*.cpp llmc/cpu/*.cpp llmc/train/*.cpp llmc/infer/*.cpp)
HOST_OBJ := $(HOST_SRC:%.cpp=$B/%.o)

# ---- GPU code --------------------------------------------------------------------------------------------------------
ifneq ($(strip $(NVCC)),)
CUDA_HOME := $(patsubst %/bin/nvcc,%,$(realpath $(NVCC)))
CUDA_SRC  := $(wildcard llmc/cuda/*.cu llmc/cuda/*/*.cu)
CUDA_OBJ  := $(CUDA_SRC:%.cu=$B/%.o)
NVCCFLAGS += -std=c++20 -O3 -I. -MMD -MP --Werror all-warnings -Xcompiler -Wall,-Wextra,-Werror \
             $(foreach a,$(GPU_ARCH),-gencode arch=compute_$a,code=sm_$a)
MAIN_FLAGS := -DWEFT_CUDA
LDLIBS    += -L$(CUDA_HOME)/lib64 -lcudart_static -lrt -ldl -lpthread
endif
BUILD_KIND := $(if $(strip $(NVCC)),CPU + CUDA for sm_$(subst $() , sm_,$(strip $(GPU_ARCH))),CPU only (no nvcc found))

PROGRAMS   := train_llama infer_pythia
TEST_SRC   := $(wildcard test/cpp/*_test.cpp)
TEST_OBJ   := $(TEST_SRC:%.cpp=$B/%.o)
TEST_TOOLS := $(patsubst test/cpp/%_main.cpp,$B/%,$(wildcard test/cpp/*_main.cpp))

.PHONY: all programs tests help clean FORCE
all: programs
	@echo "built $(PROGRAMS): $(BUILD_KIND)"

programs: $(PROGRAMS:%=$B/%)
ifeq ($(MODE),release)
programs: $(PROGRAMS)
$(PROGRAMS): %: $B/%
	@ln -sf $< $@
endif

# Changed flags rebuild everything; an unchanged line leaves the stamp's time alone.
FLAGS_LINE := $(CXX) $(CXXFLAGS) $(MAIN_FLAGS) $(LDLIBS) | $(NVCC) $(NVCCFLAGS)
$B/flags: FORCE
	@mkdir -p $(@D); echo '$(FLAGS_LINE)' | cmp -s - $@ || echo '$(FLAGS_LINE)' > $@

VERSION := $(shell git describe --always --dirty 2>/dev/null || echo unknown)
$B/version.h: FORCE
	@mkdir -p $(@D); line='#define WEFT_VERSION "$(VERSION)"'; kind='#define WEFT_BUILD "$(BUILD_KIND)"'; \
	printf '%s\n%s\n' "$$line" "$$kind" | cmp -s - $@ || printf '%s\n%s\n' "$$line" "$$kind" > $@

$B/%.o: %.cpp $B/flags
	@mkdir -p $(@D)
	$(CXX) $(CXXFLAGS) -c $< -o $@

# The mains are plain C++ under the name that their readers look for.
$B/%.main.o: %.cu $B/flags $B/version.h
	@mkdir -p $(@D)
	$(CXX) $(CXXFLAGS) $(MAIN_FLAGS) -I$B -x c++ -c $< -o $@

$B/llmc/cuda/%.o: llmc/cuda/%.cu $B/flags
	@mkdir -p $(@D)
	$(NVCC) $(NVCCFLAGS) -c $< -o $@

$B/libweft.a: $(HOST_OBJ) $(CUDA_OBJ)
	@rm -f $@; ar rcs $@ $^

$(PROGRAMS:%=$B/%): $B/%: $B/%.main.o $B/libweft.a
	$(CXX) $(LDFLAGS) $< $B/libweft.a $(LDLIBS) -o $@

# ---- tests -----------------------------------------------------------------------------------------------------------
tests: $B/unit_tests $(TEST_TOOLS) programs
$B/unit_tests: $(TEST_OBJ) $B/libweft.a
	$(CXX) $(LDFLAGS) $(TEST_OBJ) $B/libweft.a $(LDLIBS) -lgtest -lgtest_main -lpthread -o $@
$(TEST_TOOLS): $B/%: $B/test/cpp/%_main.o $B/libweft.a
	$(CXX) $(LDFLAGS) $< $B/libweft.a $(LDLIBS) -o $@

help:
	@echo "make            build train_llama and infer_pythia"
	@echo "make clean      remove build/"

clean:
	rm -rf build $(PROGRAMS)

.SECONDARY:
-include $(HOST_OBJ:.o=.d) $(CUDA_OBJ:.o=.d) $(TEST_OBJ:.o=.d) $(PROGRAMS:%=$B/%.main.d) $(TEST_TOOLS:$B/%=$B/test/cpp/%_main.d)
