# weft: make help lists the targets.
#
# Two builds come from one source tree: with GPU code where nvcc and a GPU are found, and for the CPU alone elsewhere.
# Settings, on the command line or in the environment:
#   GPU_ARCH="80 90a 120" GPU architectures; default: that of the GPU found. Given by name it builds GPU code without a GPU, too
#   NVCC=...              the CUDA compiler, which then compiles GPU code, GPU or not; NVCC= builds for the CPU alone
#   GPU_FLAGS=...         more flags for nvcc
#   GPU_PTX=120           also PTX of this architecture, which drivers compile for later GPUs
#   CPU_FLAGS=...         host instruction set; default -march=native (the binary is for this machine)
#   ROOMS=                one object a source file, for work on one of them (below)
#   MODE=release|asan|tsan|dist   build/<mode> holds the result; dist is that of make dist
#   PREFIX=, DESTDIR=     where make install puts things
#   V=1                   show the commands
#   -jN                   N jobs at once; default: as many as this process may use cores

# Not the first target of this file, which is one of those that are made from lists.
.DEFAULT_GOAL := all

# Only in the outermost make: the ones below share its jobs. -j on the command line wins.
ifeq ($(MAKELEVEL)$(filter -j%,$(MAKEFLAGS)),0)
MAKEFLAGS += -j$(shell nproc 2>/dev/null || echo 2)
endif

MODE      ?= release
CXX       ?= g++
CPU_FLAGS ?= $(if $(filter dist,$(MODE)),-march=x86-64-v3,-march=native)
PREFIX    ?= /usr/local
PYTHON    ?= python3

# A GPU older than 8.0 does not count: the kernels cannot be built for it.
FOUND_ARCH := $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | tr -d '. ' | awk '/^[0-9]+$$/ && $$1 >= 80' | sort -u | sed 's/^90$$/90a/' | tr '\n' ' ')
NVCC_FOUND := $(firstword $(shell command -v nvcc 2>/dev/null) $(wildcard /usr/local/cuda/bin/nvcc))
# Compiling GPU code takes longer than all else together: only where it can run, or was asked for.
GPU_WANTED := $(strip $(FOUND_ARCH))$(filter-out undefined,$(origin GPU_ARCH))
NVCC ?= $(if $(GPU_WANTED),$(NVCC_FOUND))
# For what contains GPU code wherever there is a compiler for it, unless NVCC= was given: all tests, and the tarball.
NVCC_ANYWAY := $(if $(filter file,$(origin NVCC)),$(NVCC_FOUND),$(NVCC))
GPU_ARCH ?= $(if $(strip $(FOUND_ARCH)),$(strip $(FOUND_ARCH)),80 90a 120)
ifneq ($(filter 90,$(GPU_ARCH)),)
$(error GPU_ARCH: got 90, which lacks the instructions of the Hopper kernels. Use 90a)
endif
ifneq ($(filter 5% 6% 7%,$(GPU_ARCH)),)
$(error GPU_ARCH: got $(GPU_ARCH), weft's kernels need 80 or later)
endif

, := ,
B := build/$(MODE)
Q := $(if $(V),,@)

# `[3/81]   CXX ...`: the number of this object, of those that were not there when make began. Counted while recipes expand;
# where changed sources are compiled again, there may be more than that, and only the first number is shown.
DONE :=
say = $(eval DONE += x)echo "[$(words $(DONE))$(if $(wordlist $(words $(DONE)),$(words $(ABSENT)),$(ABSENT)),/$(words $(ABSENT)))]  $1"

# ---- host code -------------------------------------------------------------------------------------------------------
MODE_FLAGS_release := -O3
MODE_FLAGS_dist    := -O3
# In instrumented string sums GCC 12 sees bounds that are not there. The release build has these warnings.
NO_FALSE_BOUNDS := -Wno-array-bounds -Wno-stringop-overflow -Wno-stringop-overread
# -g1: line numbers for the reports. Full debug information takes a quarter of the compile time.
MODE_FLAGS_asan    := -O1 -g1 -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer $(NO_FALSE_BOUNDS)
MODE_FLAGS_tsan    := -O1 -fsanitize=thread $(NO_FALSE_BOUNDS)
# Of the tests' own code: compiling it takes longer than running it, and what it tests is compiled as in the programs.
TEST_LEVEL := -O0
# No fast-math on host code: with it isfinite() lies. OpenBLAS's OpenMP flavour shares the thread pool with our loops.
# GCC 12 warns falsely about string concatenation at -O3 (GCC bug 105651): -Wno-restrict.
# -ffp-contract=off: where a compiler may choose which products to fuse into additions, its tuning decides the bits of a sum
# (GCC's does, for AMD's Zen). The kernels that want fused ones say so (llmc/cpu/lanes.h).
CXXFLAGS += -std=c++20 $(MODE_FLAGS_$(MODE)) $(CPU_FLAGS) -ffp-contract=off -fopenmp -Wall -Wextra -Werror -Wno-restrict -I. -MMD -MP
LDLIBS   += -lopenblas -lpcre2-8 -lutf8proc
# Of make dist: libraries beside the programs, those that OpenBLAS needs in turn, too (which a RUNPATH would not find).
LDLIBS   += $(if $(filter dist,$(MODE)),-Wl$(,)--disable-new-dtags$(,)-rpath$(,)\$$ORIGIN/../lib/weft)
LDFLAGS  += $(filter -fsanitize%,$(MODE_FLAGS_$(MODE))) -fopenmp

# Line editing for --interactive, where libedit is installed.
ifneq ($(shell $(CXX) -E -x c++ -include histedit.h /dev/null >/dev/null 2>&1 && echo yes),)
EDIT_FLAGS := -DWEFT_EDITLINE
LDLIBS     += -ledit
endif

HOST_SRC := $(wildcard llmc/base/*.cpp llmc/file/*.cpp llmc/text/*.cpp llmc/model/*.cpp llmc/model/families/*.cpp llmc/model/formats/*.cpp llmc/model/optimizers/*.cpp llmc/comm/*.cpp llmc/cpu/*.cpp llmc/train/*.cpp llmc/infer/*.cpp llmc/serve/*.cpp llmc/app/*.cpp)
HOST_OBJ := $(HOST_SRC:%.cpp=$B/%.o)
# What infer_pythia has beyond train_llama, in an archive of its own: make demo trains before these are compiled.
TRAIN_NEEDS := $(addprefix llmc/infer/,generate.cpp prompt.cpp stop_text.cpp text_output.cpp text_stream.cpp)
INFER_SRC := $(filter-out $(TRAIN_NEEDS),$(filter llmc/infer/% llmc/serve/% llmc/app/decode_%,$(HOST_SRC)))
INFER_OBJ := $(INFER_SRC:%.cpp=$B/%.o)

# The files of these rooms are compiled as one source each, which halves the time of a first build: most of it is templates, of
# JSON above all, that every source compiles again. ROOMS= compiles each file alone, for work on one of them.
ROOMS ?= base text model comm train infer serve
room_files    = $(filter-out $(TRAIN_NEEDS),$(wildcard llmc/$1/*.cpp))
ROOM_OBJ     := $(ROOMS:%=$B/llmc/%/room.o)
instead_of    = $(filter-out $(patsubst %.cpp,$B/%.o,$(foreach r,$2,$(call room_files,$r))),$1) $(patsubst %,$B/llmc/%/room.o,$2)
HOST_OBJ     := $(call instead_of,$(HOST_OBJ),$(ROOMS))
INFER_OBJ    := $(call instead_of,$(INFER_OBJ),$(filter infer serve,$(ROOMS)))
$(foreach r,$(ROOMS),$(eval $B/llmc/$r/room.o: $(call room_files,$r)))

# ---- GPU code --------------------------------------------------------------------------------------------------------
ifneq ($(strip $(NVCC)),)
CUDA_HOME := $(patsubst %/bin/nvcc,%,$(realpath $(NVCC)))
# What has no device code there is a .cpp, which g++ compiles once: nvcc would parse it once more for each architecture.
CUDA_SRC  := $(sort $(wildcard $(foreach e,cu cpp,llmc/cuda/*/*.$e llmc/cuda/*/*/*.$e llmc/cuda/*/*/*/*.$e)))
CUDA_OBJ  := $(patsubst %,$B/%.o,$(basename $(CUDA_SRC)))
NVCCFLAGS += -std=c++20 -O3 -I. -MMD -MP --Werror all-warnings -Xcompiler -Wall,-Wextra,-Werror \
             $(foreach a,$(GPU_ARCH),-gencode arch=compute_$a,code=sm_$a) \
             $(if $(GPU_PTX),-gencode arch=compute_$(GPU_PTX)$(,)code=compute_$(GPU_PTX)) $(GPU_FLAGS)
MAIN_FLAGS := -DWEFT_CUDA -isystem $(CUDA_HOME)/include
LDLIBS    += -L$(CUDA_HOME)/lib64 -Wl,-rpath,$(CUDA_HOME)/lib64 -lcudart_static -lrt -ldl -lpthread
endif
BUILD_KIND := $(if $(strip $(NVCC)),CPU + CUDA for sm_$(subst $() , sm_,$(strip $(GPU_ARCH))),CPU only)

PROGRAMS   := train_llama infer_pythia
TEST_SRC   := $(wildcard test/cpp/*_test.cpp)
# AddressSanitizer watches the library. The tests' own objects, half of what there is to compile, are those of the release build,
# which ask where they run whether they are sanitised (test/cpp/sanitized.h).
TEST_B     := $(if $(filter asan,$(MODE)),build/release,$B)
TEST_OBJ   := $(TEST_SRC:%.cpp=$(TEST_B)/%.o)
TEST_TOOLS := $(patsubst test/cpp/%_main.cpp,$B/%,$(wildcard test/cpp/*_main.cpp))
GPU_TEST_OBJ := $(patsubst %,$B/%.o,$(if $(strip $(NVCC)),$(basename $(wildcard test/gpu/*.cpp test/gpu/*.cu))))

# What this make is to build, as far as it is not there, for the progress line.
WANTED := $B/precompiled.h.gch $(HOST_OBJ) $(CUDA_OBJ) $(PROGRAMS:%=$B/%.main.o) $(PROGRAMS:%=$B/%)
ifeq ($(filter-out venv,$(MAKECMDGOALS)),train_llama)
WANTED := $(filter-out $(INFER_OBJ) $B/infer_pythia%,$(WANTED))
endif
ifneq ($(filter tests,$(MAKECMDGOALS)),)
WANTED += $B/test/precompiled.h.gch $(TEST_OBJ) $(GPU_TEST_OBJ) $(TEST_TOOLS) $(TEST_TOOLS:$B/%=$B/test/cpp/%_main.o) $B/unit_tests $(if $(GPU_TEST_OBJ),$B/gpu_tests)
endif
ABSENT := $(filter-out $(wildcard $(WANTED)),$(WANTED))

# In the one line that says what was built, where GPU code could have been but was not.
ABOUT_GPUS := $(if $(strip $(NVCC)),,$(if $(NVCC_FOUND),$(if $(strip $(FOUND_ARCH)),, (no GPU found; GPU_ARCH=\"80 90a 120\" builds for GPUs)), (no nvcc found)))

.PHONY: all programs tests release-tests test-all test-op bits asan_tests tsan thread_tests deps doctor venv demo test fuzz mutants bench benches ladder profile profile-infer \
        headers list-headers lint compile_commands.json torch format install uninstall dist clean help FORCE
all: programs
	@echo "built $(PROGRAMS): $(BUILD_KIND)$(ABOUT_GPUS)"

programs: $(PROGRAMS:%=$B/%)
ifeq ($(MODE),release)
programs: $(PROGRAMS)
$(PROGRAMS): %: $B/%
	@ln -sf $< $@
endif

# Changed flags rebuild what they concern; an unchanged line leaves its stamp's time alone.
HOST_FLAGS_LINE := $(CXX) $(CXXFLAGS), tests $(TEST_LEVEL)
LINK_FLAGS_LINE := $(MAIN_FLAGS) $(EDIT_FLAGS) $(LDLIBS) $(NVCC) $(NVCCFLAGS)
$B/host-flags: FORCE
	@scripts/deps.sh --check
	@mkdir -p $(@D); echo '$(HOST_FLAGS_LINE)' | cmp -s - $@ || echo '$(HOST_FLAGS_LINE)' > $@
$B/link-flags: FORCE
	@mkdir -p $(@D); echo '$(LINK_FLAGS_LINE)' | cmp -s - $@ || echo '$(LINK_FLAGS_LINE)' > $@

# "0.3.0+1a2b3c4": the number is in the file VERSION, the commit is that of the checkout, if this is one.
COMMIT  := $(shell git rev-parse --is-inside-work-tree >/dev/null 2>&1 && git describe --always --dirty --exclude '*' 2>/dev/null)
VERSION := $(shell cat VERSION)$(if $(COMMIT),+$(COMMIT))
$B/version.h: FORCE
	@mkdir -p $(@D); \
	printf '#define WEFT_VERSION "%s"\n#define WEFT_BUILD "%s"\n' '$(VERSION)' '$(BUILD_KIND)' > $@.new; \
	if cmp -s $@.new $@; then rm $@.new; else mv $@.new $@; fi

# What most files include is parsed once: g++ takes X.h.gch for X.h, which it includes first of all.
PRECOMPILED := $B/precompiled.h
$B/precompiled.h.gch: llmc/base/precompiled.h
$B/test/precompiled.h.gch: test/cpp/precompiled.h
$B/%.h.gch: $B/host-flags
	@mkdir -p $(@D); $(call say,CXX   $(firstword $(filter %/precompiled.h %/standard.h,$^)))
	$Q$(CXX) $(CXXFLAGS) -MF $(@:.gch=.d) -MT $@ -x c++-header $(firstword $(filter %/precompiled.h %/standard.h,$^)) -o $@.new && mv $@.new $@
$B/test/%: PRECOMPILED := $B/test/precompiled.h
# private: what is said of one object holds for it alone, not for what it needs.
$B/test/precompiled.h.gch: private CXXFLAGS += $(TEST_LEVEL)

$B/%.o: %.cpp $B/host-flags $B/precompiled.h.gch
	@mkdir -p $(@D); $(call say,CXX   $<)
	$Q$(CXX) $(CXXFLAGS) -include $(PRECOMPILED) -c $< -o $@
$(filter $B/%,$(TEST_OBJ)) $(TEST_TOOLS:$B/%=$B/test/cpp/%_main.o): $B/test/precompiled.h.gch
$(filter-out $B/%,$(TEST_OBJ)): release-tests ;
release-tests:
	@$(MAKE) --no-print-directory -s MODE=release NVCC= $(TEST_OBJ)

# A class with a member of a private type is one where it is included, and still has but one definition.
$(ROOM_OBJ): private CXXFLAGS += -Wno-subobject-linkage
$(ROOM_OBJ): $B/llmc/%/room.o: $B/host-flags $B/precompiled.h.gch
	@mkdir -p $(@D); $(call say,CXX   llmc/$*/*.cpp)
	@printf '#include "%s"\n' $(call room_files,$*) >$(@:.o=.cpp)
	$Q$(CXX) $(CXXFLAGS) -include $(PRECOMPILED) -c $(@:.o=.cpp) -o $@

# llmc/app is the host code that knows both devices: what it contains depends on the build, as for the mains.
$B/llmc/app/%.o: private CXXFLAGS += $(MAIN_FLAGS)
$(patsubst %.cpp,$B/%.o,$(wildcard llmc/app/*.cpp)): $B/link-flags

# Asio's fences stand between handlers that a mutex orders anyway: that ThreadSanitizer does not know fences loses nothing.
$(patsubst %.cpp,$B/%.o,$(wildcard llmc/serve/http*.cpp)) $B/llmc/serve/room.o: private CXXFLAGS += -Wno-tsan

# The page is put in by the assembler, of which -MMD knows nothing.
$B/llmc/serve/page.o $B/llmc/serve/room.o: llmc/serve/page.html

$B/llmc/infer/line_input.o $B/llmc/infer/room.o: private CXXFLAGS += $(EDIT_FLAGS)
$B/llmc/infer/line_input.o $B/llmc/infer/room.o: $B/link-flags

# The mains are plain C++ under the name that their readers look for.
$B/%.main.o: %.cu $B/host-flags $B/link-flags $B/version.h $B/precompiled.h.gch
	@mkdir -p $(@D); $(call say,CXX   $<)
	$Q$(CXX) $(CXXFLAGS) $(MAIN_FLAGS) -I$B -include $(PRECOMPILED) -x c++ -c $< -o $@

$B/llmc/cuda/%.o: private CXXFLAGS += -isystem $(CUDA_HOME)/include
$B/llmc/cuda/%.o: llmc/cuda/%.cu $B/link-flags
	@mkdir -p $(@D); $(call say,NVCC  $<)
	$Q$(NVCC) $(NVCCFLAGS) -c $< -o $@

$B/test/gpu/%.o: test/gpu/%.cu $B/link-flags
	@mkdir -p $(@D); echo "  NVCC  $<"
	$Q$(NVCC) $(NVCCFLAGS) -c $< -o $@

$B/libinfer.a: $(INFER_OBJ)
$B/libweft.a: $(filter-out $(INFER_OBJ),$(HOST_OBJ)) $(CUDA_OBJ)
$B/libinfer.a $B/libweft.a:
	@rm -f $@; ar rcs $@ $^
LIBS := $B/libinfer.a $B/libweft.a

$B/train_llama: $B/train_llama.main.o $B/libweft.a
$B/infer_pythia: $B/infer_pythia.main.o $(LIBS)
$(PROGRAMS:%=$B/%):
	@$(call say,LINK  $@)
	$Q$(CXX) $(LDFLAGS) $^ $(LDLIBS) -o $@

# ---- tests -----------------------------------------------------------------------------------------------------------
tests: $B/unit_tests $(TEST_TOOLS) programs $(if $(GPU_TEST_OBJ),$B/gpu_tests)
$B/test/cpp/%.o: private CXXFLAGS += $(TEST_LEVEL)
# This one computes for a minute: it is compiled as the library is.
$B/test/cpp/fused_tolerance_test.o: private CXXFLAGS += $(filter -O%,$(MODE_FLAGS_$(MODE)))
$B/test/cpp/fused_tolerance_test.o: PRECOMPILED := $B/precompiled.h
# The library's objects come first: of an inline function that a test has, too, the linker keeps the first copy, and a test's is
# not optimised. What was read by JSON at -O0 took four times as long.
$B/unit_tests: $(TEST_OBJ) $(LIBS)
	@$(call say,LINK  $@)
	$Q$(CXX) $(LDFLAGS) $(HOST_OBJ) $^ $(LDLIBS) -lgtest -lgtest_main -lpthread -o $@
$B/gpu_tests: $(GPU_TEST_OBJ) $(LIBS)
	@$(call say,LINK  $@)
	$Q$(CXX) $(LDFLAGS) $^ $(LDLIBS) -lgtest -lpthread -o $@
# The tests of kernels compute much themselves: at -O0 they take six times as long. Where no GPU runs them, that costs nothing.
$B/test/gpu/%.o: private CXXFLAGS += -isystem $(CUDA_HOME)/include $(if $(strip $(FOUND_ARCH)),,$(TEST_LEVEL))
$B/test/gpu/%: PRECOMPILED := $B/$(if $(strip $(FOUND_ARCH)),,test/)precompiled.h
$(GPU_TEST_OBJ): $B/test/precompiled.h.gch
$(TEST_TOOLS): $B/%: $B/test/cpp/%_main.o $(LIBS)
	@$(call say,LINK  $@)
	$Q$(CXX) $(LDFLAGS) $^ $(LDLIBS) -o $@

# The bits of a row depend on the instruction set alone, not on what else is computed nor on the CPU that the compiler tunes for.
# So the kernels are compiled as other machines would, for the tests of equal bits and for cpu_bits, whose lines test/run.py
# compares. The rest of the program is the release build's: it knows no vector registers.
CPU_KERNELS := $(filter-out %/training.cpp %/inference.cpp %/inference_layers.cpp %/fp8_linears.cpp,$(wildcard llmc/cpu/*.cpp))
BIT_TESTS   := inference quantized speculation
BIT_BUILDS  := native-zen v3 v3-zen
BIT_FLAGS_native-zen := -mtune=znver3
BIT_FLAGS_v3         := -march=x86-64-v3 -mtune=generic
BIT_FLAGS_v3-zen     := -march=x86-64-v3 -mtune=znver3
define bit_build
$B/bits/$1/%.o: %.cpp $B/host-flags
	@mkdir -p $$(@D); $$(call say,CXX   $$<)
	$$Q$$(CXX) $$(CXXFLAGS) $$(BIT_FLAGS_$1) -c $$< -o $$@
$B/bits/$1/cpu_bits: $(CPU_KERNELS:%.cpp=$B/bits/$1/%.o) $B/test/cpp/cpu_bits_main.o $(LIBS)
$B/bits/$1/tests: $(CPU_KERNELS:%.cpp=$B/bits/$1/%.o) $(BIT_TESTS:%=$B/test/cpp/%_test.o) $(LIBS)
$B/bits/$1/tests: private LDLIBS += -lgtest -lgtest_main -lpthread
endef
$(foreach build,$(BIT_BUILDS),$(eval $(call bit_build,$(build))))
BIT_PROGRAMS := $(foreach build,$(BIT_BUILDS),$B/bits/$(build)/cpu_bits $B/bits/$(build)/tests)
$(BIT_PROGRAMS):
	@$(call say,LINK  $@)
	$Q$(CXX) $(LDFLAGS) $^ $(LDLIBS) -o $@
bits: $B/cpu_bits $(BIT_PROGRAMS)

# What a user waits for: the programs as users build them, units, goldens, hostile files, whole runs, a server. The packages of
# the scripts are fetched while the compiler works. GPU=must refuses to skip the GPU suite, here and in test-all.
test: deps
	@echo "make test: $(BUILD_KIND)$(ABOUT_GPUS)"
	@$(MAKE) --no-print-directory DEPS_DONE=1 venv tests
	@GPU=$(GPU) NVCC='$(NVCC)' GPU_ARCH='$(GPU_ARCH)' .venv/bin/python test/run.py --quick $(if $(TEST_SAVE),--save $(TEST_SAVE))

asan_tests: programs $B/unit_tests

# Everything that this machine can test; where there is nvcc, all GPU code is compiled, GPU or not.
test-all: GPU_CODE := NVCC='$(NVCC_ANYWAY)' GPU_ARCH='$(GPU_ARCH)'
test-all: deps venv
	@$(MAKE) --no-print-directory $(GPU_CODE) tests bits
	@$(MAKE) --no-print-directory asan_tests MODE=asan NVCC=
	@$(MAKE) --no-print-directory tsan
	@GPU=$(GPU) $(GPU_CODE) .venv/bin/python test/run.py $(TEST_ADD:%=--add %) $(TEST_QUICK:%=--after-quick %)

# One operator's tests as a program of their own: those whose names contain OP, whatever the case of its letters.
OP_FILES := $(if $(OP),$(shell grep -liE '^(TYPED_)?TEST(_[FP])?.[A-Za-z0-9_, ]*$(OP)' $(wildcard test/cpp/*_test.cpp $(if $(strip $(NVCC)),test/gpu/*_test.cpp))))
OP_OBJ   := $(OP_FILES:%.cpp=$B/%.o) $(if $(filter test/gpu/%,$(OP_FILES)),$(filter-out %_test.o,$(GPU_TEST_OBJ)))
$B/op_tests/$(OP): $(OP_OBJ) $(LIBS)
	@mkdir -p $(@D); $(call say,LINK  $@)
	$Q$(CXX) $(LDFLAGS) $(HOST_OBJ) $^ $(LDLIBS) -lgtest $(if $(filter %/main.o,$^),,-lgtest_main) -lpthread -o $@
test-op:
	@$(if $(OP_FILES),,echo "make test-op: got OP=$(OP), expected a word in the names of tests: make test-op OP=swiglu" >&2; exit 2)
	@$(MAKE) --no-print-directory $B/op_tests/$(OP)
	@$(PYTHON) test/run.py --op $(OP) $B/op_tests/$(OP)

# libFuzzer with ASan and UBSan on everything that reads a file: FUZZ_S seconds each. Needs clang (scripts/deps.sh --fuzz).
fuzz: deps
	@$(PYTHON) test/fuzz/run.py --seconds $(or $(FUZZ_S),60) $(FUZZ_TARGETS)

# Proof that the tests can fail: plants bugs in a copy of the tree, and wants each to turn a test red (half an hour).
mutants: deps venv
	@.venv/bin/python dev/mutants/run.py $(MUTANTS)

# The threads that read ahead and that write checkpoints, and those of the server, under ThreadSanitizer: their tests, and
# train_llama for test/run.py. libgomp is not built for it: everything runs with one OpenMP thread.
THREAD_TESTS := background_save checkpoint checkpoint_resume communicator data_loader engine initialize joint_save ranks_start run_directory \
                sample_writer serve_http serve_server train_bench train_guard train_loop train_signal write_behind
tsan:
	@$(MAKE) --no-print-directory MODE=tsan NVCC= thread_tests
thread_tests: $B/thread_tests $B/train_llama
$B/thread_tests: $(THREAD_TESTS:%=$B/test/cpp/%_test.o) $(LIBS)
	@$(call say,LINK  $@)
	$Q$(CXX) $(LDFLAGS) $(HOST_OBJ) $^ $(LDLIBS) -lgtest -lgtest_main -lpthread -o $@

# Each header compiles alone: no hidden order of includes. Those of GPU code need the CUDA toolkit; without nvcc they are
# skipped, and said to be. Of a .cuh nvcc compiles the device code, which parses all of it, for one architecture.
ALL_HEADERS   := $(sort $(wildcard $(foreach d,llmc/* llmc/*/* llmc/*/*/* llmc/*/*/*/* test/* dev/*,$d/*.h $d/*.cuh)))
CUDA_HEADERS  := $(filter llmc/cuda/% test/gpu/% dev/ladder/% %.cuh,$(ALL_HEADERS))
SKIPPED_HEADERS := $(if $(strip $(NVCC)),,$(CUDA_HEADERS))
HEADERS       := $(filter-out $(SKIPPED_HEADERS),$(ALL_HEADERS))
ONE_ARCH      := $(or $(filter 90a,$(GPU_ARCH)),$(lastword $(GPU_ARCH)))
NO_NVCC := : GPU code, and there is no nvcc
headers: $(HEADERS:%=$B/headers/%.ok)
	@echo "headers: $(words $(HEADERS)) compile alone, $(words $(SKIPPED_HEADERS)) skipped$(if $(SKIPPED_HEADERS),$(NO_NVCC))"
list-headers:
	@printf '%s\n' $(HEADERS:%='compiled %') $(SKIPPED_HEADERS:%='skipped %')
$(CUDA_HEADERS:%=$B/headers/%.ok): private CXXFLAGS += $(if $(strip $(NVCC)),-isystem $(CUDA_HOME)/include)
# The standard library's headers are parsed once for all: that each file names those it needs, test_includes.py sees.
$B/headers/standard.h: llmc/base/precompiled.h
	@mkdir -p $(@D); grep '#include <' $< >$@
$B/headers/standard.h.gch: $B/headers/standard.h
$B/headers/%.h.ok: %.h $B/host-flags $B/headers/standard.h.gch
	@mkdir -p $(@D); rm -f $@
	@$(CXX) $(CXXFLAGS) -include $B/headers/standard.h -MF $(@:.ok=.d) -MT $@ -w -fsyntax-only -x c++ $< && touch $@ || { echo "header FAILED $<"; exit 1; }
$B/headers/%.cuh.ok: %.cuh $B/link-flags
	@mkdir -p $(@D); rm -f $@
	@$(NVCC) -std=c++20 -I. -arch=sm_$(ONE_ARCH) -w -MD -MF $(@:.ok=.d) -MT $@ -ptx -x cu $< -o $@.ptx && rm $@.ptx && touch $@ || \
	  { echo "header FAILED $<"; exit 1; }

# The programs of dev/ that stand beside the Python ones, for one architecture: benchmarks, and what shows how a kernel is made.
CUPTI := $(if $(strip $(NVCC)),$(firstword $(wildcard $(CUDA_HOME)/include/cupti.h $(CUDA_HOME)/extras/CUPTI/include/cupti.h)))
BENCHES := $(patsubst %.cpp,$B/%,$(filter-out dev/bench/timeline.cpp,$(wildcard dev/bench/*.cpp))) \
           $(if $(CUPTI),$B/dev/bench/timeline.o) \
           $(if $(strip $(NVCC)),$(patsubst %.cu,$B/%,$(wildcard dev/bench/*.cu)) $(patsubst %.cu,$B/%.o,$(wildcard dev/ladder/*.cu)))
benches: $(BENCHES)
	@$(if $(strip $(NVCC)),,echo "benches: those of GPU code skipped: there is no nvcc")
	@$(if $(CUPTI),,echo "benches: dev/bench/timeline.cpp skipped: there is no cupti.h")
$B/dev/%.o: dev/%.cu $B/link-flags
	@mkdir -p $(@D); $(call say,NVCC  $<)
	$Q$(NVCC) $(filter-out -gencode arch=%,$(NVCCFLAGS)) -gencode arch=compute_$(ONE_ARCH),code=sm_$(ONE_ARCH) -c $< -o $@
$B/dev/bench/timeline.o: private CXXFLAGS += -isystem $(CUDA_HOME)/include -isystem $(CUDA_HOME)/extras/CUPTI/include
$(filter-out %.o,$(BENCHES)): $B/dev/%: $B/dev/%.o $(LIBS)
	@$(call say,LINK  $@)
	$Q$(CXX) $(LDFLAGS) $^ $(LDLIBS) -o $@

# ---- the first minutes -----------------------------------------------------------------------------------------------
deps:
	@scripts/deps.sh --check 2>/dev/null || scripts/deps.sh

doctor:
	@NVCC='$(or $(strip $(NVCC)),$(NVCC_FOUND))' scripts/doctor.sh

venv: .venv/ready
.venv/ready: scripts/requirements.txt | $(if $(DEPS_DONE),,deps)
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; (3, 11) <= v <= (3, 13) or sys.exit("venv: $(PYTHON) is %d.%d, the scripts need 3.11 to 3.13. PYTHON= names another" % v)'
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@touch $@

# torch and transformers, for references and for the baselines of make bench. The versions of the scripts' own packages stay.
torch: venv
	.venv/bin/python -m pip install --disable-pip-version-check -r scripts/requirements-torch.txt

# The packages of the scripts are fetched while the programs are compiled: DEPS_DONE, because a second check of deps would put
# venv behind them.
# infer_pythia, its server and their libraries are compiled after the training, which thus begins in half the time.
demo: deps
	@$(MAKE) --no-print-directory DEPS_DONE=1 venv train_llama
	@scripts/run_demo.sh train
	@printf '\n== building infer_pythia\n'
	@$(MAKE) --no-print-directory DEPS_DONE=1 all
	@scripts/run_demo.sh infer
	@scripts/run_demo.sh chat

# What runs on a GPU alone says so before anything is compiled for it.
GPU_MISSING := $(if $(NVCC_FOUND)$(strip $(NVCC)),$(if $(strip $(FOUND_ARCH)),$(if $(strip $(NVCC)),,NVCC is empty: got a build for the CPU alone),no GPU found: nvidia-smi lists none of compute capability 8.0 or later),no nvcc found: install the CUDA toolkit or name one with NVCC=)
on_gpu = @$(if $(GPU_MISSING),echo "$@: $(GPU_MISSING). It runs on a GPU" >&2; exit 4,$1)
ifeq ($(strip $(NVCC)),)
# FORCE: a build with GPU code may have left the program there.
$(patsubst %.cu,$B/%,$(wildcard dev/bench/*.cu)): FORCE
	@echo "$(@F): $(GPU_MISSING). It runs on a GPU" >&2; exit 4
endif

# Training steps and decoding beside PyTorch (make torch), on the GPU of this machine.
bench: $(if $(GPU_MISSING),,all venv)
	$(call on_gpu,.venv/bin/python dev/bench/training.py)
	$(call on_gpu,.venv/bin/python dev/bench/decode.py)

# A norm and an attention kernel from naive to today's, each step checked and timed (dev/ladder/README.md). LADDER= its
# arguments. Builds without a GPU, which only running needs.
LADDER_OBJ := $(patsubst %.cu,$B/%.o,$(if $(strip $(NVCC)),$(wildcard dev/ladder/*.cu)))
$B/ladder: $(LADDER_OBJ) $(LIBS)
	@$(call say,LINK  $@)
	$Q$(CXX) $(LDFLAGS) $^ $(LDLIBS) -o $@
ladder: $(if $(strip $(NVCC)),$B/ladder)
	@$(if $(strip $(NVCC)),$B/ladder $(LADDER),echo "ladder: no nvcc found, expected a CUDA compiler. NVCC= names one" >&2; exit 4)

# One training step under Nsight Compute, as a table by operator.
profile: $(if $(GPU_MISSING),,all venv)
	$(call on_gpu,.venv/bin/python dev/bench/profile_step.py)
# The same for one decoded token.
profile-infer: $(if $(GPU_MISSING),,all venv)
	$(call on_gpu,.venv/bin/python dev/bench/profile_decode.py)

# ---- housekeeping ----------------------------------------------------------------------------------------------------
format:
	clang-format -i $(shell git ls-files '*.cu' '*.cuh' '*.h' '*.cpp')

# clang-format, clang-tidy, ruff, mypy and shellcheck, as configured in .clang-format, .clang-tidy and pyproject.toml.
lint: .venv/lint-ready
	@MAKEFLAGS= CXX='$(CXX)' scripts/lint.sh $(LINT_STEPS)
.venv/lint-ready: scripts/requirements-lint.txt | venv
	.venv/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@touch $@

# For editors and clang tools: how every host file of this build is compiled.
compile_commands.json:
	@$(PYTHON) scripts/compile_commands.py --flags '$(filter-out -MMD -MP,$(CXXFLAGS)) $(MAIN_FLAGS) -I$B' --compiler '$(CXX)' \
	  $(if $(strip $(NVCC)),--cuda '$(CUDA_HOME)') -o $@

# Programs and scripts become commands: scripts/convert_hf.py is weft-convert-hf. Their manual pages are what --help prints.
SCRIPTS  := scripts/convert_hf.py scripts/export_hf.py scripts/plot_log.py scripts/export_log.py scripts/tensor_file.py \
            scripts/dump_reference.py scripts/train_reference.py dev/prepare_data.py dev/train_tokenizer.py
SHIPPED  := $(filter-out scripts/make_% scripts/run_clang_tidy.py scripts/compile_commands.py,$(wildcard scripts/*.py)) \
            scripts/requirements.txt scripts/requirements-torch.txt dev/prepare_data.py dev/train_tokenizer.py \
            dev/download_starter_pack.sh $(wildcard dev/data/*.py dev/data/*/*.py models/tiny-*/*) VERSION LICENSE
command   = weft-$(subst _,-,$(basename $(notdir $1)))
COMMANDS := $(foreach s,$(SCRIPTS) dev/download_starter_pack.sh setup,$(call command,$s))
PAGES    := $(PROGRAMS) $(foreach s,$(SCRIPTS),$(call command,$s))
AT        = $(DESTDIR)$(PREFIX)
install: all
	install -d $(AT)/bin $(AT)/share/man/man1 $(AT)/lib/systemd/system
	install -m 755 $(PROGRAMS:%=$B/%) $(AT)/bin
	install -m 755 packaging/weft-script $(AT)/bin/weft-setup
	for name in $(filter-out weft-setup,$(COMMANDS)); do ln -sf weft-setup $(AT)/bin/$$name; done
	for file in $(SHIPPED); do \
	  install -D -m $$([ -x $$file ] && echo 755 || echo 644) $$file $(AT)/share/weft/$$file || exit; done
	sed 's|/usr/local|$(PREFIX)|' packaging/weft.service >$(AT)/lib/systemd/system/weft.service
	for name in $(PROGRAMS); do \
	  $(PYTHON) scripts/make_man.py $$name $(VERSION) $(AT)/bin/$$name >$(AT)/share/man/man1/$$name.1 || exit; done
	$(foreach s,$(SCRIPTS),$(PYTHON) scripts/make_man.py $(call command,$s) $(VERSION) $(AT)/share/weft/$s \
	  >$(AT)/share/man/man1/$(call command,$s).1 &&) true
	rm -rf $(AT)/share/weft/scripts/__pycache__ $(AT)/share/weft/dev/__pycache__

uninstall:
	rm -f $(PROGRAMS:%=$(AT)/bin/%) $(COMMANDS:%=$(AT)/bin/%) $(PAGES:%=$(AT)/share/man/man1/%.1) $(AT)/lib/systemd/system/weft.service
	rm -rf $(AT)/share/weft

# A tarball that runs where nothing is compiled: the programs for any x86-64-v3 CPU, with nvcc for GPUs too, and the libraries
# that they need, with their licences. NCCL and cuBLAS are found at run time. Unpack it anywhere.
DIST := weft-$(VERSION)-linux-x86_64$(if $(strip $(NVCC)),-cuda,-cpu)
dist: venv
	@$(if $(strip $(NVCC_ANYWAY)),,echo "dist: no nvcc$(,) so this tarball is for the CPU alone")
	@$(MAKE) --no-print-directory MODE=dist NVCC='$(NVCC_ANYWAY)' GPU_ARCH='80 90a 120' GPU_PTX=120 programs
	rm -rf build/dist/$(DIST) && mkdir -p build/dist/$(DIST)
	@$(MAKE) --no-print-directory MODE=dist NVCC='$(NVCC_ANYWAY)' GPU_ARCH='80 90a 120' GPU_PTX=120 PREFIX=/ DESTDIR=build/dist/$(DIST) install >/dev/null
	packaging/pack_libraries.sh build/dist/$(DIST)
	for name in tiny-llama tiny-pythia; do \
	  .venv/bin/python -B build/dist/$(DIST)/share/weft/scripts/convert_hf.py models/$$name \
	    -o build/dist/$(DIST)/share/weft/models/$$name.bin >/dev/null || exit; done
	cp packaging/weft.service build/dist/$(DIST)/lib/systemd/system
	cp README.md LICENSE VERSION build/dist/$(DIST)
	cp packaging/README.md build/dist/$(DIST)/INSTALL.md
	cp -r doc build/dist/$(DIST)/share/weft
	tar -C build/dist --sort=name --owner=0 --group=0 --numeric-owner -czf build/$(DIST).tar.gz $(DIST)
	@ls -lh build/$(DIST).tar.gz | awk '{print "dist: " $$NF ", " $$5}'

clean:
	rm -rf build $(PROGRAMS)

help:
	@echo "make            build train_llama and infer_pythia ($(BUILD_KIND))"
	@echo "make demo       build, train a tiny Llama on generated stories, plot, run the tiny Pythia, tune and chat (4 to 9 minutes on 2 cores)"
	@echo "make test       the programs as you build them: units, goldens, hostile files, whole runs, a server (about 10 minutes on 2 cores)"
	@echo "make test-all   every test this machine can run, with sanitizers; GPU=must refuses to skip those that need a GPU"
	@echo "make test-op    OP=swiglu: the tests of one operator, as a program of their own"
	@echo "make fuzz       FUZZ_S=60 seconds for each fuzz target (clang's libFuzzer); FUZZ_TARGETS= some of them"
	@echo "make mutants    plant bugs in a copy of the tree, one at a time: does a test find each?"
	@echo "make tsan       build the tests of weft's own threads under ThreadSanitizer; make test runs them"
	@echo "make bench      training steps and decoding on the GPU beside PyTorch, as tables"
	@echo "make ladder     a norm and an attention kernel from naive to today's, each step checked and timed; needs a GPU to run"
	@echo "make profile    one training step on the GPU under Nsight Compute, by operator; profile-infer: one decoded token"
	@echo "make doctor     check compiler, CUDA, GPU, libraries, Python, disk; say what to install"
	@echo "make deps       install the system packages that are missing (needs root or sudo)"
	@echo "make venv       Python packages of the scripts, into .venv"
	@echo "make torch      PyTorch and transformers into .venv, for references and baselines"
	@echo "make install    programs, scripts as commands, manual pages; PREFIX=$(PREFIX) DESTDIR=; also: make uninstall"
	@echo "make dist       a tarball that runs on machines without a compiler"
	@echo "make format     clang-format over the sources"
	@echo "make lint       clang-format, clang-tidy, ruff, mypy, shellcheck; LINT_STEPS=\"format ruff mypy shell tidy\" chooses"
	@echo "make compile_commands.json   for editors and clang tools"
	@echo "make headers    compile each header alone"
	@echo "make benches    compile the programs under dev/"
	@echo "make clean      remove build/"
	@echo "settings        GPU_ARCH=\"$(GPU_ARCH)\"  NVCC= (CPU only)  MODE=release|asan|tsan  CPU_FLAGS=$(CPU_FLAGS)"

.SECONDARY:
-include $(HOST_OBJ:.o=.d) $(CUDA_OBJ:.o=.d) $(TEST_OBJ:.o=.d) $(GPU_TEST_OBJ:.o=.d) $(PROGRAMS:%=$B/%.main.d)
-include $(TEST_TOOLS:$B/%=$B/test/cpp/%_main.d) $B/precompiled.h.d $B/test/precompiled.h.d
-include $(foreach build,$(BIT_BUILDS),$(CPU_KERNELS:%.cpp=$B/bits/$(build)/%.d)) $(HEADERS:%=$B/headers/%.d) $(BENCHES:%=%.d)
