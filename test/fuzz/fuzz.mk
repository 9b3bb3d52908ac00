# The fuzz targets (make fuzz): clang's libFuzzer with AddressSanitizer and UndefinedBehaviorSanitizer.
# Run from the root of the repository; what it needs and what the targets read is in doc/robustness.md.
FUZZ_CXX ?= clang++
F := build/fuzz

TARGETS := $(patsubst test/fuzz/%_fuzz.cpp,%,$(wildcard test/fuzz/*_fuzz.cpp))
# Everything that a target may reach. A room's files are one source, as in the Makefile: most of a file's time goes into the
# templates of JSON. file.cpp stays alone: a target's own MappedFile takes the place of its (below), which no inlining may undo.
base_SRC  := $(filter-out %/file.cpp,$(wildcard llmc/base/*.cpp))
text_SRC  := $(wildcard llmc/text/*.cpp)
model_SRC := $(wildcard llmc/model/*.cpp)
comm_SRC  := $(wildcard llmc/comm/*.cpp)
train_SRC := $(addprefix llmc/train/,checkpoint.cpp fault_injection.cpp guard.cpp options.cpp schedule.cpp)
infer_SRC := $(addprefix llmc/infer/,chat.cpp completion.cpp fault_injection.cpp option_values.cpp options.cpp prompt.cpp requested_rules.cpp stop_text.cpp text_stream.cpp)
serve_SRC := $(addprefix llmc/serve/,answer_choice.cpp answer_json.cpp chat_request.cpp completions_request.cpp request_fields.cpp text_request.cpp tokenize_request.cpp request_target.cpp)
ROOMS     := base text model comm train infer serve
SRC := llmc/base/file.cpp $(wildcard llmc/file/*.cpp llmc/model/*/*.cpp) test/fuzz/tensor_bytes.cpp
OBJ := $(ROOMS:%=$F/llmc/%/room.o) $(SRC:%.cpp=$F/%.o)

CHECKS := -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer
# No -march=native: a corpus and its figures are then the same on every machine.
FLAGS := -std=c++20 -O2 -gline-tables-only $(CHECKS) -fsanitize=fuzzer-no-link \
         -fno-sanitize-coverage=trace-cmp -Wall -Wextra -Werror -Wno-unknown-pragmas \
         -Wno-unused-private-field -I. -MMD -MP

.PHONY: all
all: $(TARGETS:%=$F/%)

# Without trace-cmp twice as many executions a second; what it would find, constants to compare with, is in the seeds and
# dictionaries. The targets have the same flags as weft: inline functions that both have must not lose their checks.
$F/%.o: %.cpp test/fuzz/fuzz.mk
	@mkdir -p $(@D); echo "  FUZZ  $<"
	@$(FUZZ_CXX) $(FLAGS) -c $< -o $@

$(foreach r,$(ROOMS),$(eval $F/llmc/$r/room.o: $($r_SRC)))
$(ROOMS:%=$F/llmc/%/room.o): $F/llmc/%/room.o: test/fuzz/fuzz.mk
	@mkdir -p $(@D); echo "  FUZZ  llmc/$*/*.cpp"
	@printf '#include "%s"\n' $($*_SRC) >$(@:.o=.cpp)
	@$(FUZZ_CXX) $(FLAGS) -c $(@:.o=.cpp) -o $@

# memory_files.o has its own MappedFile and read_text_file: those of file.o give way.
$F/libweft.a: $(OBJ)
	@objcopy --wildcard --weaken-symbol='_ZN*4weft10MappedFile*' --weaken-symbol='_ZN4weft14read_text_file*' \
	  $F/llmc/base/file.o
	@rm -f $@; ar rcs $@ $^

$(TARGETS:%=$F/%): $F/%: $F/test/fuzz/%_fuzz.o $F/test/fuzz/memory_files.o $F/libweft.a
	@$(FUZZ_CXX) $(CHECKS) -fsanitize=fuzzer $^ -lpcre2-8 -lutf8proc -lgomp -lpthread -o $@

.SECONDARY:
-include $F/test/fuzz/memory_files.d $(OBJ:.o=.d) $(TARGETS:%=$F/test/fuzz/%_fuzz.d)
