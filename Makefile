# kvlag. `make` builds ./kvlag; `make demo` and `make check` do everything else by themselves. `make help` lists targets.
#   CC=gcc|clang   MODE=release|asan|ubsan|tsan   PREFIX=/usr/local
CC     = gcc
MODE   = release
PREFIX = /usr/local
BUILD  = build/$(notdir $(CC))-$(MODE)
PY     = .venv/bin/python
VERSION = 0.1.0

PACKAGES = hdf5 openblas libzstd libpcre2-8 libcjson libxxhash
CPPFLAGS = -I. -D_GNU_SOURCE -DKVLAG_VERSION='"$(VERSION)"' $(shell pkg-config --cflags $(PACKAGES) 2>/dev/null)
CFLAGS   = -std=c17 -O2 -g -Wall -Wextra -Wpedantic -Wshadow -Werror -ffp-contract=off -fno-math-errno
LDLIBS   = $(shell pkg-config --libs $(PACKAGES) 2>/dev/null) -lm -lpthread
CFLAGS_asan  = -fsanitize=address -fno-omit-frame-pointer
CFLAGS_ubsan = -fsanitize=undefined -fno-sanitize-recover=all
CFLAGS_tsan  = -fsanitize=thread
CFLAGS  += $(CFLAGS_$(MODE))
LDFLAGS += $(CFLAGS_$(MODE))

SOURCES = $(filter-out traces/kernels.c,$(wildcard base/*.c traces/*.c tracer/*.c tracer/cpu/*.c sim/*.c sim/policies/*.c analyze/*.c))
HEADERS = $(wildcard base/*.h traces/*.h tracer/*.h tracer/cpu/*.h sim/*.h sim/policies/*.h analyze/*.h)
OBJECTS = $(SOURCES:%.c=$(BUILD)/%.o) $(KERNELS)
# The vector kernels are one source, compiled once for each instruction set and chosen at run time.
KERNELS = $(BUILD)/traces/kernels_portable.o $(BUILD)/traces/kernels_avx2.o $(BUILD)/traces/kernels_avx512.o
UNIT    = $(patsubst tests/unit/%.c,$(BUILD)/tests/unit/%,$(wildcard tests/unit/test_*.c))

MAKEFLAGS += --no-builtin-rules

all: $(BUILD)/kvlag
	@cmp -s $(BUILD)/kvlag kvlag || cp $(BUILD)/kvlag kvlag

$(BUILD)/kvlag: $(BUILD)/kvlag.o $(OBJECTS)
	$(CC) $(LDFLAGS) -o $@ $^ $(LDLIBS)

$(BUILD)/%.o: %.c
	@mkdir -p $(@D)
	$(CC) $(CPPFLAGS) $(CFLAGS) -MMD -MP -c -o $@ $<

KERNEL_FLAGS_portable =
KERNEL_FLAGS_avx2     = -mavx2 -mfma -mf16c
KERNEL_FLAGS_avx512   = -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx2 -mfma -mf16c -mprefer-vector-width=512
$(BUILD)/traces/kernels_%.o: traces/kernels.c
	@mkdir -p $(@D)
	$(CC) $(CPPFLAGS) $(CFLAGS) -O3 -Wno-psabi $(KERNEL_FLAGS_$*) -DKERNELS=kernels_$* -MMD -MP -c -o $@ $<

$(BUILD)/tests/unit/%: $(BUILD)/tests/unit/%.o $(OBJECTS)
	$(CC) $(LDFLAGS) -o $@ $^ $(LDLIBS) $(shell pkg-config --libs cmocka)
.PRECIOUS: $(BUILD)/%.o

# Every header compiles alone.
headers: $(HEADERS:%.h=$(BUILD)/%.h.ok)
$(BUILD)/%.h.ok: %.h
	@mkdir -p $(@D)
	$(CC) $(CPPFLAGS) $(CFLAGS) -Wno-unused -fsyntax-only -include $< -x c /dev/null
	@touch $@

-include $(shell find build -name '*.d' 2>/dev/null)
