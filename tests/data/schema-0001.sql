CREATE TABLE autotune_schema (
    version_num character varying(32) NOT NULL
);
CREATE TABLE device (
    id integer NOT NULL,
    key character varying NOT NULL,
    name character varying NOT NULL,
    kind character varying NOT NULL,
    arch character varying NOT NULL,
    sm_count integer NOT NULL,
    spec json NOT NULL
);
CREATE SEQUENCE device_id_seq
    AS integer
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;
ALTER SEQUENCE device_id_seq OWNED BY device.id;
CREATE TABLE layer (
    id integer NOT NULL,
    problem character varying NOT NULL,
    n bigint NOT NULL,
    c bigint NOT NULL,
    h bigint NOT NULL,
    w bigint NOT NULL,
    k bigint NOT NULL,
    r bigint NOT NULL,
    s bigint NOT NULL,
    stride_h bigint NOT NULL,
    stride_w bigint NOT NULL,
    pad_top bigint NOT NULL,
    pad_bottom bigint NOT NULL,
    pad_left bigint NOT NULL,
    pad_right bigint NOT NULL,
    dilation_h bigint NOT NULL,
    dilation_w bigint NOT NULL,
    groups bigint NOT NULL,
    dtype character varying NOT NULL,
    layout character varying NOT NULL,
    epilogue character varying NOT NULL,
    out_dtype character varying NOT NULL
);
CREATE SEQUENCE layer_id_seq
    AS integer
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;
ALTER SEQUENCE layer_id_seq OWNED BY layer.id;
CREATE TABLE record (
    id integer NOT NULL,
    layer_id integer NOT NULL,
    device_id integer NOT NULL,
    family character varying NOT NULL,
    config character varying NOT NULL,
    knobs json NOT NULL,
    kernel_digest character varying NOT NULL,
    compiler character varying NOT NULL,
    driver character varying NOT NULL,
    harness integer NOT NULL,
    clock_mhz integer,
    temperature_c integer,
    created_at character varying NOT NULL,
    time_us double precision NOT NULL,
    spread_us double precision NOT NULL,
    samples integer NOT NULL,
    launches integer NOT NULL,
    condition character varying NOT NULL,
    verified boolean NOT NULL,
    CONSTRAINT ck_record_times CHECK (((time_us > (0)::double precision) AND (time_us < ('1000000000000000000000000000000'::numeric)::double precision) AND (spread_us >= (0)::double precision) AND (spread_us < ('1000000000000000000000000000000'::numeric)::double precision) AND (samples > 0) AND (launches > 0)))
);
CREATE SEQUENCE record_id_seq
    AS integer
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;
ALTER SEQUENCE record_id_seq OWNED BY record.id;
CREATE TABLE trial (
    id integer NOT NULL,
    layer_id integer NOT NULL,
    device_id integer NOT NULL,
    family character varying NOT NULL,
    config character varying NOT NULL,
    knobs json NOT NULL,
    kernel_digest character varying NOT NULL,
    compiler character varying NOT NULL,
    driver character varying NOT NULL,
    harness integer NOT NULL,
    clock_mhz integer,
    temperature_c integer,
    created_at character varying NOT NULL,
    status character varying NOT NULL,
    detail character varying NOT NULL,
    time_us double precision,
    spread_us double precision,
    samples integer,
    launches integer,
    condition character varying,
    compile_s double precision NOT NULL,
    registers integer,
    spill_bytes integer,
    CONSTRAINT ck_trial_measured CHECK ((((status)::text = 'correct'::text) = ((time_us IS NOT NULL) AND (spread_us IS NOT NULL) AND (samples IS NOT NULL) AND (launches IS NOT NULL) AND (condition IS NOT NULL)))),
    CONSTRAINT ck_trial_status CHECK (((status)::text = ANY ((ARRAY['correct'::character varying, 'compile'::character varying, 'constraints'::character varying, 'runtime'::character varying, 'correctness'::character varying, 'timeout'::character varying])::text[]))),
    CONSTRAINT ck_trial_times CHECK (((time_us IS NULL) OR ((time_us > (0)::double precision) AND (time_us < ('1000000000000000000000000000000'::numeric)::double precision) AND (spread_us >= (0)::double precision) AND (spread_us < ('1000000000000000000000000000000'::numeric)::double precision) AND (samples > 0) AND (launches > 0))))
);
CREATE SEQUENCE trial_id_seq
    AS integer
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;
ALTER SEQUENCE trial_id_seq OWNED BY trial.id;
ALTER TABLE ONLY device ALTER COLUMN id SET DEFAULT nextval('device_id_seq'::regclass);
ALTER TABLE ONLY layer ALTER COLUMN id SET DEFAULT nextval('layer_id_seq'::regclass);
ALTER TABLE ONLY record ALTER COLUMN id SET DEFAULT nextval('record_id_seq'::regclass);
ALTER TABLE ONLY trial ALTER COLUMN id SET DEFAULT nextval('trial_id_seq'::regclass);
INSERT INTO autotune_schema VALUES ('0001');
INSERT INTO device VALUES (1, 'NVIDIA H200 x132', 'NVIDIA H200', 'cuda', 'sm_90a', 132, '{"kind": "cuda", "name": "NVIDIA H200", "arch": "sm_90a", "compute_capability": [9, 0], "sm_count": 132, "smem_per_cta": 232448, "smem_per_sm": 233472, "l2_bytes": 62914560, "vector_bytes": 0, "bytes_per_s": 4200000000000.0, "rates": [["f16", 700000000000000.0], ["f32", 50000000000000.0]]}');
INSERT INTO device VALUES (2, 'Example CPU @ 2.50GHz x4', 'Example CPU @ 2.50GHz', 'cpu', 'x86-64-avx2', 4, '{"kind": "cpu", "name": "Example CPU @ 2.50GHz", "arch": "x86-64-avx2", "compute_capability": [0, 0], "sm_count": 4, "smem_per_cta": 0, "smem_per_sm": 0, "l2_bytes": 8388608, "vector_bytes": 32, "bytes_per_s": 25000000000.0, "rates": [["f32", 150000000000.0]]}');
INSERT INTO layer VALUES (1, 'n1c16h14w14-k32r3s3-stride1x1-pad1.1.1.1-dil1x1-g1-f16-nhwc-identity-f16', 1, 16, 14, 14, 32, 3, 3, 1, 1, 1, 1, 1, 1, 1, 1, 1, 'f16', 'nhwc', 'identity', 'f16');
INSERT INTO layer VALUES (2, 'n1c24h9w8-k48r3s2-stride2x1-pad0.1.2.3-dil1x2-g12-s8-nchw-scale_channel+bias+residual+relu-s8', 1, 24, 9, 8, 48, 3, 2, 2, 1, 0, 1, 2, 3, 1, 2, 12, 's8', 'nchw', 'scale_channel+bias+residual+relu', 's8');
INSERT INTO record VALUES (1, 1, 1, 'igemm_mma', 'igemm_mma-cta128x64x32-stages1-raster_group4', '{"cta_m": 128, "cta_n": 64, "cta_k": 32, "stages": 1, "raster_group": 4}', 'abababababababababababababababababababababababababababababababab', 'nvrtc 13.0', '580.95', 1, 1980, 41, '2025-01-02T03:04:05+00:00', 0.30000000000000004, 0.125, 25, 10, 'cold-graph', true);
INSERT INTO record VALUES (2, 1, 2, 'igemm_mma', 'igemm_mma-cta128x64x32-stages1-raster_group4', '{"cta_m": 128, "cta_n": 64, "cta_k": 32, "stages": 1, "raster_group": 4}', 'abababababababababababababababababababababababababababababababab', 'nvrtc 13.0', '580.95', 1, 1980, 41, '2025-01-02T03:04:05+00:00', 0.30000000000000004, 0.125, 25, 10, 'cold-graph', false);
INSERT INTO record VALUES (3, 2, 1, 'igemm_mma', 'igemm_mma-cta128x64x32-stages1-raster_group4', '{"cta_m": 128, "cta_n": 64, "cta_k": 32, "stages": 1, "raster_group": 4}', 'abababababababababababababababababababababababababababababababab', 'nvrtc 13.0', '580.95', 1, 1980, 41, '2025-01-02T03:04:05+00:00', 0.30000000000000004, 0.125, 25, 10, 'cold-graph', true);
INSERT INTO record VALUES (4, 2, 2, 'igemm_mma', 'igemm_mma-cta128x64x32-stages1-raster_group4', '{"cta_m": 128, "cta_n": 64, "cta_k": 32, "stages": 1, "raster_group": 4}', 'abababababababababababababababababababababababababababababababab', 'nvrtc 13.0', '580.95', 1, 1980, 41, '2025-01-02T03:04:05+00:00', 0.30000000000000004, 0.125, 25, 10, 'cold-graph', false);
INSERT INTO trial VALUES (1, 1, 1, 'igemm_mma', 'igemm_mma-cta128x64x32-stages1-raster_group4', '{"cta_m": 128, "cta_n": 64, "cta_k": 32, "stages": 1, "raster_group": 4}', 'abababababababababababababababababababababababababababababababab', 'nvrtc 13.0', '580.95', 1, 1980, 41, '2025-01-02T03:04:05+00:00', 'correct', '', 0.30000000000000004, 0.125, 25, 10, 'cold-graph', 0, 168, 0);
INSERT INTO trial VALUES (2, 1, 1, 'igemm_mma', 'igemm_mma-cta128x64x32-stages2-raster_group4', '{"cta_m": 128, "cta_n": 64, "cta_k": 32, "stages": 2, "raster_group": 4}', 'abababababababababababababababababababababababababababababababab', 'nvrtc 13.0', '580.95', 1, 1980, 41, '2025-01-02T03:04:05+00:00', 'correct', '', 1.3, 0.125, 25, 10, 'cold-graph', 0.25, NULL, 1);
INSERT INTO trial VALUES (3, 1, 1, 'igemm_mma', 'igemm_mma-cta128x64x32-stages3-raster_group4', '{"cta_m": 128, "cta_n": 64, "cta_k": 32, "stages": 3, "raster_group": 4}', 'abababababababababababababababababababababababababababababababab', 'nvrtc 13.0', '580.95', 1, NULL, 41, '2025-01-02T03:04:05+00:00', 'compile', 'it''s "no" | good; ünïcödé', NULL, NULL, NULL, NULL, NULL, 0.5, 168, 2);
INSERT INTO trial VALUES (4, 1, 1, 'igemm_mma', 'igemm_mma-cta128x64x32-stages4-raster_group4', '{"cta_m": 128, "cta_n": 64, "cta_k": 32, "stages": 4, "raster_group": 4}', 'abababababababababababababababababababababababababababababababab', 'nvrtc 13.0', '580.95', 1, 1980, 41, '2025-01-02T03:04:05+00:00', 'constraints', 'it''s "no" | good; ünïcödé', NULL, NULL, NULL, NULL, NULL, 0.75, 168, 3);
INSERT INTO trial VALUES (5, 1, 1, 'igemm_mma', 'igemm_mma-cta128x64x32-stages5-raster_group4', '{"cta_m": 128, "cta_n": 64, "cta_k": 32, "stages": 5, "raster_group": 4}', 'abababababababababababababababababababababababababababababababab', 'nvrtc 13.0', '580.95', 1, 1980, 41, '2025-01-02T03:04:05+00:00', 'runtime', 'it''s "no" | good; ünïcödé', NULL, NULL, NULL, NULL, NULL, 1, 168, 4);
INSERT INTO trial VALUES (6, 1, 1, 'igemm_mma', 'igemm_mma-cta128x64x32-stages6-raster_group4', '{"cta_m": 128, "cta_n": 64, "cta_k": 32, "stages": 6, "raster_group": 4}', 'abababababababababababababababababababababababababababababababab', 'nvrtc 13.0', '580.95', 1, 1980, 41, '2025-01-02T03:04:05+00:00', 'correctness', 'it''s "no" | good; ünïcödé', NULL, NULL, NULL, NULL, NULL, 1.25, 168, 5);
INSERT INTO trial VALUES (7, 1, 1, 'igemm_mma', 'igemm_mma-cta128x64x32-stages7-raster_group4', '{"cta_m": 128, "cta_n": 64, "cta_k": 32, "stages": 7, "raster_group": 4}', 'abababababababababababababababababababababababababababababababab', 'nvrtc 13.0', '580.95', 1, 1980, 41, '2025-01-02T03:04:05+00:00', 'timeout', 'it''s "no" | good; ünïcödé', NULL, NULL, NULL, NULL, NULL, 1.5, 168, 6);
INSERT INTO trial VALUES (8, 1, 2, 'igemm_mma', 'igemm_mma-cta128x64x32-stages1-raster_group4', '{"cta_m": 128, "cta_n": 64, "cta_k": 32, "stages": 1, "raster_group": 4}', 'abababababababababababababababababababababababababababababababab', 'nvrtc 13.0', '580.95', 1, 1980, 41, '2025-01-02T03:04:05+00:00', 'correct', '', 0.30000000000000004, 0.125, 25, 10, 'cold-graph', 0, 168, 0);
INSERT INTO trial VALUES (9, 1, 2, 'igemm_mma', 'igemm_mma-cta128x64x32-stages2-raster_group4', '{"cta_m": 128, "cta_n": 64, "cta_k": 32, "stages": 2, "raster_group": 4}', 'abababababababababababababababababababababababababababababababab', 'nvrtc 13.0', '580.95', 1, 1980, 41, '2025-01-02T03:04:05+00:00', 'correct', '', 1.3, 0.125, 25, 10, 'cold-graph', 0.25, NULL, 1);
INSERT INTO trial VALUES (10, 1, 2, 'igemm_mma', 'igemm_mma-cta128x64x32-stages3-raster_group4', '{"cta_m": 128, "cta_n": 64, "cta_k": 32, "stages": 3, "raster_group": 4}', 'abababababababababababababababababababababababababababababababab', 'nvrtc 13.0', '580.95', 1, NULL, 41, '2025-01-02T03:04:05+00:00', 'compile', 'it''s "no" | good; ünïcödé', NULL, NULL, NULL, NULL, NULL, 0.5, 168, 2);
INSERT INTO trial VALUES (11, 1, 2, 'igemm_mma', 'igemm_mma-cta128x64x32-stages4-raster_group4', '{"cta_m": 128, "cta_n": 64, "cta_k": 32, "stages": 4, "raster_group": 4}', 'abababababababababababababababababababababababababababababababab', 'nvrtc 13.0', '580.95', 1, 1980, 41, '2025-01-02T03:04:05+00:00', 'constraints', 'it''s "no" | good; ünïcödé', NULL, NULL, NULL, NULL, NULL, 0.75, 168, 3);
INSERT INTO trial VALUES (12, 1, 2, 'igemm_mma', 'igemm_mma-cta128x64x32-stages5-raster_group4', '{"cta_m": 128, "cta_n": 64, "cta_k": 32, "stages": 5, "raster_group": 4}', 'abababababababababababababababababababababababababababababababab', 'nvrtc 13.0', '580.95', 1, 1980, 41, '2025-01-02T03:04:05+00:00', 'runtime', 'it''s "no" | good; ünïcödé', NULL, NULL, NULL, NULL, NULL, 1, 168, 4);
INSERT INTO trial VALUES (13, 1, 2, 'igemm_mma', 'igemm_mma-cta128x64x32-stages6-raster_group4', '{"cta_m": 128, "cta_n": 64, "cta_k": 32, "stages": 6, "raster_group": 4}', 'abababababababababababababababababababababababababababababababab', 'nvrtc 13.0', '580.95', 1, 1980, 41, '2025-01-02T03:04:05+00:00', 'correctness', 'it''s "no" | good; ünïcödé', NULL, NULL, NULL, NULL, NULL, 1.25, 168, 5);
INSERT INTO trial VALUES (14, 1, 2, 'igemm_mma', 'igemm_mma-cta128x64x32-stages7-raster_group4', '{"cta_m": 128, "cta_n": 64, "cta_k": 32, "stages": 7, "raster_group": 4}', 'abababababababababababababababababababababababababababababababab', 'nvrtc 13.0', '580.95', 1, 1980, 41, '2025-01-02T03:04:05+00:00', 'timeout', 'it''s "no" | good; ünïcödé', NULL, NULL, NULL, NULL, NULL, 1.5, 168, 6);
INSERT INTO trial VALUES (15, 2, 1, 'igemm_mma', 'igemm_mma-cta128x64x32-stages1-raster_group4', '{"cta_m": 128, "cta_n": 64, "cta_k": 32, "stages": 1, "raster_group": 4}', 'abababababababababababababababababababababababababababababababab', 'nvrtc 13.0', '580.95', 1, 1980, 41, '2025-01-02T03:04:05+00:00', 'correct', '', 0.30000000000000004, 0.125, 25, 10, 'cold-graph', 0, 168, 0);
INSERT INTO trial VALUES (16, 2, 1, 'igemm_mma', 'igemm_mma-cta128x64x32-stages2-raster_group4', '{"cta_m": 128, "cta_n": 64, "cta_k": 32, "stages": 2, "raster_group": 4}', 'abababababababababababababababababababababababababababababababab', 'nvrtc 13.0', '580.95', 1, 1980, 41, '2025-01-02T03:04:05+00:00', 'correct', '', 1.3, 0.125, 25, 10, 'cold-graph', 0.25, NULL, 1);
INSERT INTO trial VALUES (17, 2, 1, 'igemm_mma', 'igemm_mma-cta128x64x32-stages3-raster_group4', '{"cta_m": 128, "cta_n": 64, "cta_k": 32, "stages": 3, "raster_group": 4}', 'abababababababababababababababababababababababababababababababab', 'nvrtc 13.0', '580.95', 1, NULL, 41, '2025-01-02T03:04:05+00:00', 'compile', 'it''s "no" | good; ünïcödé', NULL, NULL, NULL, NULL, NULL, 0.5, 168, 2);
INSERT INTO trial VALUES (18, 2, 1, 'igemm_mma', 'igemm_mma-cta128x64x32-stages4-raster_group4', '{"cta_m": 128, "cta_n": 64, "cta_k": 32, "stages": 4, "raster_group": 4}', 'abababababababababababababababababababababababababababababababab', 'nvrtc 13.0', '580.95', 1, 1980, 41, '2025-01-02T03:04:05+00:00', 'constraints', 'it''s "no" | good; ünïcödé', NULL, NULL, NULL, NULL, NULL, 0.75, 168, 3);
INSERT INTO trial VALUES (19, 2, 1, 'igemm_mma', 'igemm_mma-cta128x64x32-stages5-raster_group4', '{"cta_m": 128, "cta_n": 64, "cta_k": 32, "stages": 5, "raster_group": 4}', 'abababababababababababababababababababababababababababababababab', 'nvrtc 13.0', '580.95', 1, 1980, 41, '2025-01-02T03:04:05+00:00', 'runtime', 'it''s "no" | good; ünïcödé', NULL, NULL, NULL, NULL, NULL, 1, 168, 4);
INSERT INTO trial VALUES (20, 2, 1, 'igemm_mma', 'igemm_mma-cta128x64x32-stages6-raster_group4', '{"cta_m": 128, "cta_n": 64, "cta_k": 32, "stages": 6, "raster_group": 4}', 'abababababababababababababababababababababababababababababababab', 'nvrtc 13.0', '580.95', 1, 1980, 41, '2025-01-02T03:04:05+00:00', 'correctness', 'it''s "no" | good; ünïcödé', NULL, NULL, NULL, NULL, NULL, 1.25, 168, 5);
INSERT INTO trial VALUES (21, 2, 1, 'igemm_mma', 'igemm_mma-cta128x64x32-stages7-raster_group4', '{"cta_m": 128, "cta_n": 64, "cta_k": 32, "stages": 7, "raster_group": 4}', 'abababababababababababababababababababababababababababababababab', 'nvrtc 13.0', '580.95', 1, 1980, 41, '2025-01-02T03:04:05+00:00', 'timeout', 'it''s "no" | good; ünïcödé', NULL, NULL, NULL, NULL, NULL, 1.5, 168, 6);
INSERT INTO trial VALUES (22, 2, 2, 'igemm_mma', 'igemm_mma-cta128x64x32-stages1-raster_group4', '{"cta_m": 128, "cta_n": 64, "cta_k": 32, "stages": 1, "raster_group": 4}', 'abababababababababababababababababababababababababababababababab', 'nvrtc 13.0', '580.95', 1, 1980, 41, '2025-01-02T03:04:05+00:00', 'correct', '', 0.30000000000000004, 0.125, 25, 10, 'cold-graph', 0, 168, 0);
INSERT INTO trial VALUES (23, 2, 2, 'igemm_mma', 'igemm_mma-cta128x64x32-stages2-raster_group4', '{"cta_m": 128, "cta_n": 64, "cta_k": 32, "stages": 2, "raster_group": 4}', 'abababababababababababababababababababababababababababababababab', 'nvrtc 13.0', '580.95', 1, 1980, 41, '2025-01-02T03:04:05+00:00', 'correct', '', 1.3, 0.125, 25, 10, 'cold-graph', 0.25, NULL, 1);
INSERT INTO trial VALUES (24, 2, 2, 'igemm_mma', 'igemm_mma-cta128x64x32-stages3-raster_group4', '{"cta_m": 128, "cta_n": 64, "cta_k": 32, "stages": 3, "raster_group": 4}', 'abababababababababababababababababababababababababababababababab', 'nvrtc 13.0', '580.95', 1, NULL, 41, '2025-01-02T03:04:05+00:00', 'compile', 'it''s "no" | good; ünïcödé', NULL, NULL, NULL, NULL, NULL, 0.5, 168, 2);
INSERT INTO trial VALUES (25, 2, 2, 'igemm_mma', 'igemm_mma-cta128x64x32-stages4-raster_group4', '{"cta_m": 128, "cta_n": 64, "cta_k": 32, "stages": 4, "raster_group": 4}', 'abababababababababababababababababababababababababababababababab', 'nvrtc 13.0', '580.95', 1, 1980, 41, '2025-01-02T03:04:05+00:00', 'constraints', 'it''s "no" | good; ünïcödé', NULL, NULL, NULL, NULL, NULL, 0.75, 168, 3);
INSERT INTO trial VALUES (26, 2, 2, 'igemm_mma', 'igemm_mma-cta128x64x32-stages5-raster_group4', '{"cta_m": 128, "cta_n": 64, "cta_k": 32, "stages": 5, "raster_group": 4}', 'abababababababababababababababababababababababababababababababab', 'nvrtc 13.0', '580.95', 1, 1980, 41, '2025-01-02T03:04:05+00:00', 'runtime', 'it''s "no" | good; ünïcödé', NULL, NULL, NULL, NULL, NULL, 1, 168, 4);
INSERT INTO trial VALUES (27, 2, 2, 'igemm_mma', 'igemm_mma-cta128x64x32-stages6-raster_group4', '{"cta_m": 128, "cta_n": 64, "cta_k": 32, "stages": 6, "raster_group": 4}', 'abababababababababababababababababababababababababababababababab', 'nvrtc 13.0', '580.95', 1, 1980, 41, '2025-01-02T03:04:05+00:00', 'correctness', 'it''s "no" | good; ünïcödé', NULL, NULL, NULL, NULL, NULL, 1.25, 168, 5);
INSERT INTO trial VALUES (28, 2, 2, 'igemm_mma', 'igemm_mma-cta128x64x32-stages7-raster_group4', '{"cta_m": 128, "cta_n": 64, "cta_k": 32, "stages": 7, "raster_group": 4}', 'abababababababababababababababababababababababababababababababab', 'nvrtc 13.0', '580.95', 1, 1980, 41, '2025-01-02T03:04:05+00:00', 'timeout', 'it''s "no" | good; ünïcödé', NULL, NULL, NULL, NULL, NULL, 1.5, 168, 6);
SELECT pg_catalog.setval('device_id_seq', 2, true);
SELECT pg_catalog.setval('layer_id_seq', 2, true);
SELECT pg_catalog.setval('record_id_seq', 4, true);
SELECT pg_catalog.setval('trial_id_seq', 28, true);
ALTER TABLE ONLY autotune_schema
    ADD CONSTRAINT autotune_schema_pkc PRIMARY KEY (version_num);
ALTER TABLE ONLY device
    ADD CONSTRAINT pk_device PRIMARY KEY (id);
ALTER TABLE ONLY layer
    ADD CONSTRAINT pk_layer PRIMARY KEY (id);
ALTER TABLE ONLY record
    ADD CONSTRAINT pk_record PRIMARY KEY (id);
ALTER TABLE ONLY trial
    ADD CONSTRAINT pk_trial PRIMARY KEY (id);
ALTER TABLE ONLY device
    ADD CONSTRAINT uq_device UNIQUE (key);
ALTER TABLE ONLY layer
    ADD CONSTRAINT uq_layer UNIQUE (problem);
ALTER TABLE ONLY record
    ADD CONSTRAINT uq_record UNIQUE (layer_id, device_id);
ALTER TABLE ONLY trial
    ADD CONSTRAINT uq_trial UNIQUE (layer_id, device_id, config);
ALTER TABLE ONLY record
    ADD CONSTRAINT fk_record_device FOREIGN KEY (device_id) REFERENCES device(id);
ALTER TABLE ONLY record
    ADD CONSTRAINT fk_record_layer FOREIGN KEY (layer_id) REFERENCES layer(id);
ALTER TABLE ONLY trial
    ADD CONSTRAINT fk_trial_device FOREIGN KEY (device_id) REFERENCES device(id);
ALTER TABLE ONLY trial
    ADD CONSTRAINT fk_trial_layer FOREIGN KEY (layer_id) REFERENCES layer(id);
